"""Which mixer each layer has, in the words that configs use for it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.families import family_of
from kvferry.catalog.config.fields import MAX_LAYERS, Fields


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer mixes tokens with, and its MLP.

    `word` is the config's own; `attention` is `full`, `window`, `chunk` or empty; `recurrent` is `linear` (state-space
    or delta net), `conv` or empty; `only_mlp` marks layers that are nothing but an MLP.
    """

    word: str
    attention: str
    recurrent: str
    only_mlp: bool


_WORDS = {
    word: Layer(word, attention, recurrent, only_mlp)
    for word, attention, recurrent, only_mlp in (
        ("attention", "full", "", False),
        ("full_attention", "full", "", False),
        ("deepseek_sparse_attention", "full", "", False),
        ("indexed_attention", "full", "", False),
        ("sliding_attention", "window", "", False),
        ("chunked_attention", "chunk", "", False),
        ("linear_attention", "", "linear", False),
        ("mamba", "", "linear", False),
        ("mamba2", "", "linear", False),
        ("hybrid", "full", "linear", False),
        ("conv", "", "conv", False),
        ("mlp", "", "", True),
        ("moe", "", "", True),
    )
}
_MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_RECURRENT = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "linear_num_heads")
_WINDOW_MARKS = {"L": "sliding_attention", "G": "full_attention"}


def layers_of(fields: Fields) -> tuple[Layer, ...]:
    """Every layer of the model in order.

    Raises ConfigurationError for unknown words, a list of the wrong length, or too many layers.
    """
    words = fields.words("layer_types", "layers_block_type")
    pattern = fields.word("hybrid_override_pattern")
    listed = words or _marked(fields, "hybrid_override_pattern", pattern, _MARKS)
    num_layers = (
        fields.number("num_hidden_layers") if not listed else fields.number_or(len(listed), "num_hidden_layers")
    )
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS} layers")
    if listed and len(listed) != num_layers:
        raise fields.wrong("layer_types", list(listed), f"one entry for each of the {num_layers} layers")
    return tuple(_layer(fields, word) for word in listed or _arranged(fields, num_layers))


def draft_layers(fields: Fields) -> tuple[Layer, ...]:
    """The layers of the model's own draft heads (multi-token prediction); empty when it has none."""
    num_drafts = fields.count("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    pattern = fields.word("mtp_hybrid_override_pattern")
    words = fields.words("mtp_layers_block_type") or _marked(fields, "mtp_hybrid_override_pattern", pattern, _MARKS)
    words = words or ("full_attention",)
    if num_drafts * len(words) > MAX_LAYERS:
        raise fields.wrong("num_nextn_predict_layers", num_drafts, f"at most {MAX_LAYERS} layers")
    return tuple(_layer(fields, word) for word in words * num_drafts)


def _layer(fields: Fields, word: str) -> Layer:
    if word not in _WORDS:
        raise fields.wrong("layer_types", word, "one of " + ", ".join(_WORDS))
    return _WORDS[word]


def _marked(fields: Fields, name: str, pattern: str, marks: dict[str, str]) -> tuple[str, ...]:
    """The words for a pattern of one mark per layer."""
    if len(pattern) > MAX_LAYERS or not set(pattern) <= set(marks):
        expected = ", ".join(f"{mark} for {word}" for mark, word in marks.items())
        raise fields.wrong(name, pattern, f"at most {MAX_LAYERS} marks: {expected}")
    return tuple(marks[mark] for mark in pattern)


def _arranged(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The words for a config that gives a rule instead of a list."""
    for name, recurrent in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        if fields.has(name):
            chosen = set(fields.counts(name))
            return _where(num_layers, chosen, "attention", recurrent)
    if fields.has("attn_layer_period"):
        period, offset = fields.number("attn_layer_period"), fields.count("attn_layer_offset")
        chosen = {layer for layer in range(num_layers) if layer % period == offset}
        return _where(num_layers, chosen, "attention", "mamba")
    if fields.inner("linear_attn_config").has("full_attn_layers"):
        chosen = {layer - 1 for layer in fields.inner("linear_attn_config").counts("full_attn_layers")}
        return _where(num_layers, chosen, "full_attention", "linear_attention")
    if fields.has("full_attention_interval"):
        chosen = _every(num_layers, fields.number("full_attention_interval"))
        return _where(num_layers, chosen, "full_attention", "linear_attention")
    return _limited(fields, num_layers)


def _limited(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The words for attention layers, some of which see less than everything."""
    if fields.has("hybrid_layer_pattern"):
        sliding = fields.counts("hybrid_layer_pattern")
        if len(sliding) != num_layers:
            raise fields.wrong("hybrid_layer_pattern", list(sliding), f"a number for each of the {num_layers} layers")
        return tuple("sliding_attention" if mark else "full_attention" for mark in sliding)
    if fields.count("attention_chunk_size"):
        return _where(num_layers, _without_positions(fields, num_layers), "full_attention", "chunked_attention")
    if fields.count("sliding_window") and fields.flag("use_sliding_window", True):
        return _windowed(fields, num_layers)
    word = family_of(fields.word("model_type")).every_layer
    if not word and fields.has(*_RECURRENT):
        raise fields.missing("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_layer_indices")
    return (word or "full_attention",) * num_layers


def _without_positions(fields: Fields, num_layers: int) -> set[int]:
    """The layers without rotary positions: where others see a chunk, they see everything."""
    rotary = fields.counts("no_rope_layers")
    if rotary:
        return {layer for layer, mark in enumerate(rotary) if not mark}
    return _every(num_layers, fields.number("no_rope_layer_interval"))


def _windowed(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`sliding_window_pattern`: every n-th layer sees everything, or marks that are repeated. Without it, the first
    `max_window_layers` layers see everything."""
    pattern = fields.values.get("sliding_window_pattern")
    if pattern is None:
        chosen = set(range(min(num_layers, fields.count("max_window_layers"))))
    elif isinstance(pattern, str) and pattern:
        words = _marked(fields, "sliding_window_pattern", pattern, _WINDOW_MARKS)
        return tuple(words[layer % len(words)] for layer in range(num_layers))
    else:
        chosen = _every(num_layers, fields.number("sliding_window_pattern"))
    return _where(num_layers, chosen, "full_attention", "sliding_attention")


def _every(num_layers: int, interval: int) -> set[int]:
    return set(range(interval - 1, num_layers, interval))


def _where(num_layers: int, chosen: set[int], word: str, otherwise: str) -> tuple[str, ...]:
    return tuple(word if layer in chosen else otherwise for layer in range(num_layers))
