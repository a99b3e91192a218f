"""Which mixer each layer has, in the words that configs use for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvferry.catalog.config.families import family_of
from kvferry.catalog.config.fields import MAX_LAYERS, Fields
from kvferry.catalog.layers.block_configs import attention_words
from kvferry.catalog.layers.compressed import HEAVY, SPARSE, words_of_ratios
from kvferry.catalog.layers.latent import SPARSE_BLOCKS


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer mixes tokens with, and its MLP.

    `word` is the config's own; `attention` is `full`, `window`, `chunk`, `compressed` or empty; `recurrent` is `linear`
    (state-space or delta net), `conv` or empty; `only_mlp` marks layers that are nothing but an MLP.
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
        (SPARSE_BLOCKS, "full", "", False),
        ("sliding_attention", "window", "", False),
        ("chunked_attention", "chunk", "", False),
        (SPARSE, "compressed", "", False),
        (HEAVY, "compressed", "", False),
        ("linear_attention", "", "linear", False),
        ("mamba", "", "linear", False),
        ("mamba2", "", "linear", False),
        ("hybrid", "full", "linear", False),
        ("conv", "", "conv", False),
        ("no_attention", "", "", False),
        ("mlp", "", "", True),
        ("moe", "", "", True),
    )
}
_NUM_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_RECURRENT = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "linear_num_heads")
_WINDOW_MARKS = {"L": "sliding_attention", "G": "full_attention"}
_LINEAR_OR_FULL = ("linear_attention", "full_attention")
_COHERE = ("layer_switch", "order_of_interleaved_layers")
"""Cohere's words for `sliding_window_pattern`."""


def layers_of(fields: Fields) -> tuple[Layer, ...]:
    """Every layer of the model in order.

    Raises ConfigurationError for unknown words, a list of the wrong length, or too many layers.
    """
    listed, _ = _listed(fields)
    num_layers = (
        fields.number("num_hidden_layers") if not listed else fields.number_or(len(listed), "num_hidden_layers")
    )
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS} layers")
    if listed and len(listed) != num_layers:
        raise fields.wrong("layer_types", list(listed), f"one entry for each of the {num_layers} layers")
    if listed:
        fields.skip(*_ARRANGEMENTS, *_MORE_RULES, *(() if "conv" in listed else ("conv_L_cache",)))
        fields.inner("linear_attn_config").skip("full_attn_layers", "kda_layers")
    return tuple(_layer(fields, word) for word in listed or _arranged(fields, num_layers))


def _listed(fields: Fields) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of the model's layers, where each is named, and those of its draft layers, if they follow."""
    words, pattern = fields.words("layer_types", "layers_block_type"), fields.word("hybrid_override_pattern")
    words = (
        words_of_ratios(fields)
        or attention_words(fields)
        or words
        or _marked(fields, "hybrid_override_pattern", pattern, _MARKS)
    )
    num_drafts = fields.count(*_NUM_DRAFTS)
    if num_drafts and fields.has("num_hidden_layers") and len(words) == fields.number("num_hidden_layers") + num_drafts:
        return words[:-num_drafts], words[-num_drafts:]
    return words, ()


def draft_layers(fields: Fields) -> tuple[Layer, ...]:
    """The layers of the model's own draft heads (multi-token prediction); empty when it has none."""
    num_drafts = fields.count(*_NUM_DRAFTS) * fields.number_or(1, "mtp_transformer_layers")
    pattern = fields.word("mtp_hybrid_override_pattern")
    words = fields.words("mtp_layers_block_type") or _marked(fields, "mtp_hybrid_override_pattern", pattern, _MARKS)
    words = words or (family_of(fields.word("model_type")).draft_layer or "full_attention",)
    _, named = _listed(fields)
    if named:
        return tuple(_layer(fields, word) for word in named)
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
    for name, rule in _ARRANGEMENTS.items():
        if fields.has(name):
            return rule(fields, num_layers)
    return _limited(fields, num_layers)


def _at(name: str, recurrent: str, fields: Fields, num_layers: int) -> tuple[str, ...]:
    return _where(num_layers, set(fields.counts(name)), "attention", recurrent)


def _with_period(fields: Fields, num_layers: int) -> tuple[str, ...]:
    period, offset = fields.number("attn_layer_period"), fields.count("attn_layer_offset")
    chosen = {layer for layer in range(num_layers) if layer % period == offset}
    return _where(num_layers, chosen, "attention", "mamba")


def _as_kimi_says(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Two lists of numbers from 1 on, each of which says what the other does."""
    own = fields.inner("linear_attn_config")
    full, linear = ({layer - 1 for layer in own.counts(name)} for name in ("full_attn_layers", "kda_layers"))
    if not full and not linear:
        return _limited(fields, num_layers)
    return _where(num_layers, full or set(range(num_layers)) - linear, *_LINEAR_OR_FULL[::-1])


def _with_interval(fields: Fields, num_layers: int) -> tuple[str, ...]:
    return _where(num_layers, _every(num_layers, fields.number("full_attention_interval")), *_LINEAR_OR_FULL[::-1])


def _in_groups(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The last layer of each group sees everything. Where the others have convolutions, so do the layers behind the
    last whole group (vLLM 0.32: bailing_moe_linear, bailing_moe_v3)."""
    size = fields.count("layer_group_size") or 1
    chosen = _every(num_layers, size)
    if fields.has("short_conv_kernel_size"):
        chosen |= set(range(num_layers // size * size, num_layers))
    return _where(num_layers, chosen, *_LINEAR_OR_FULL[::-1])


def _by_type(fields: Fields, num_layers: int) -> tuple[str, ...]:
    types = fields.counts("attn_type_list")
    if len(types) != num_layers or not set(types) <= {0, 1}:
        raise fields.wrong("attn_type_list", list(types), f"0 (linear) or 1 for each of the {num_layers} layers")
    return tuple(_LINEAR_OR_FULL[each] for each in types)


def _limited(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The words for attention layers, some of which see less than everything."""
    if fields.has("hybrid_layer_pattern"):
        sliding = fields.counts("hybrid_layer_pattern")
        if len(sliding) != num_layers:
            raise fields.wrong("hybrid_layer_pattern", list(sliding), f"a number for each of the {num_layers} layers")
        fields.skip("attention_chunk_size")
        return tuple("sliding_attention" if mark else "full_attention" for mark in sliding)
    if fields.count("attention_chunk_size"):
        return _where(num_layers, _without_positions(fields, num_layers), "full_attention", "chunked_attention")
    if fields.flag("use_sliding_window", True) and fields.count("sliding_window"):
        return _windowed(fields, num_layers)
    fields.skip("sliding_window", "max_window_layers", "sliding_window_pattern")
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
    pattern = fields.raw("sliding_window_pattern")
    if pattern is None:
        chosen = set(range(min(num_layers, fields.count("max_window_layers"))))
    elif isinstance(pattern, str) and pattern:
        words = _marked(fields, "sliding_window_pattern", pattern, _WINDOW_MARKS)
        return tuple(words[layer % len(words)] for layer in range(num_layers))
    else:
        chosen = _every(num_layers, fields.number("sliding_window_pattern"))
        fields.skip(*_COHERE)
    return _where(num_layers, chosen, "full_attention", "sliding_attention")


def _every(num_layers: int, interval: int) -> set[int]:
    return set(range(interval - 1, num_layers, interval))


def _where(num_layers: int, chosen: set[int], word: str, otherwise: str) -> tuple[str, ...]:
    return tuple(word if layer in chosen else otherwise for layer in range(num_layers))


_ARRANGEMENTS: Mapping[str, Callable[[Fields, int], tuple[str, ...]]] = {
    "attn_layer_indices": partial(_at, "attn_layer_indices", "mamba"),
    "full_attn_idxs": partial(_at, "full_attn_idxs", "conv"),
    "attn_layer_period": _with_period,
    "linear_attn_config": _as_kimi_says,
    "full_attention_interval": _with_interval,
    "layer_group_size": _in_groups,
    "attn_type_list": _by_type,
}
"""Fields that say by a rule which layers are which."""

# Where each layer is named, these say nothing more either.
_MORE_RULES = (
    *("attn_layer_offset", "hybrid_layer_pattern", "hybrid_layer_ids", "no_rope_layers", "no_rope_layer_interval"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "attention_chunk_size"),
    *("global_attn_every_n_layers", "prefix_dense_sliding_window_pattern"),
    *_COHERE,
)
