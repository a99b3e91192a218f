"""The MLPs, dense or made of experts: they keep nothing, but they are most of what a token is multiplied with."""

from __future__ import annotations

from kvferry.catalog.config.families import family_of
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers import block_configs
from kvferry.catalog.layers.layer_types import Layer

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SPARSE_WORDS = ("sparse", "moe", "hash_moe")
# Experts that work in a space narrower than the hidden one.
_LATENT_SIZE = ("moe_latent_size", "routed_expert_hidden_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
# The first layers, whose MLPs are dense.
_NUM_DENSE = ("first_k_dense_replace", "num_dense_layers")
_SHARED_SIZE = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "share_expert_dim",
)


def mlp_parameters(fields: Fields, layers: tuple[Layer, ...]) -> int:
    """Weights of all MLPs that one token is multiplied with."""
    if fields.has(block_configs.FIELD):
        return sum(_size(fields, size) for size in block_configs.mlp_sizes(fields))
    num_dense, num_sparse = _num_layers(fields, layers)
    # When shared experts are computed; and what there is to say of experts where there are none.
    fields.skip("moe_shared_expert_overlap", *(() if num_sparse else ("moe_intermediate_size", *_NUM_DENSE, *_CHOSEN)))
    dense = _size(fields, _dense_size(fields)) if num_dense else 0
    return num_dense * dense + (num_sparse * _sparse(fields) if num_sparse else 0)


def _num_layers(fields: Fields, layers: tuple[Layer, ...]) -> tuple[int, int]:
    """How many layers have a dense MLP, and how many have experts."""
    if any(layer.only_mlp for layer in layers):
        words = [layer.word for layer in layers]
        return words.count("mlp"), words.count("moe")
    if not fields.has("num_attention_heads"):
        return 0, 0
    hybrid = [layer for layer in layers if layer.attention and layer.recurrent]
    if hybrid and len(hybrid) < len(layers):
        # Where only some layers add attention to their state space, the MLP comes with the attention (Zamba 2).
        return len(hybrid), 0
    if fields.count(*_EXPERTS) <= 1 or not fields.flag("enable_moe_block", True):
        return len(layers), 0
    sparse = sum(_is_sparse(fields, len(layers)))
    # A block of experts stands beside the dense MLP, not in its place (Gemma 4).
    beside = fields.flag("enable_moe_block", False)
    return len(layers) - (0 if beside else sparse), sparse


def _is_sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    every = range(num_layers)
    listed = fields.words("mlp_layer_types")
    if listed:
        fields.skip("decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", *_NUM_DENSE)
        return tuple(word in _SPARSE_WORDS for word in listed[:num_layers])
    if fields.has("moe_layers"):
        fields.skip("interleave_moe_layer_step")
        chosen = set(fields.counts("moe_layers"))
        return tuple(layer in chosen for layer in every)
    if fields.has("moe_layers_enum"):
        numbers = fields.word("moe_layers_enum").replace(" ", "").split(",")
        return tuple(str(layer) in numbers for layer in every)
    if fields.has("moe_layer_start_index"):
        first, step = fields.count("moe_layer_start_index"), fields.number_or(1, "moe_layer_interval")
        to_the_end = fields.raw("moe_layer_end_index") in (None, -1)
        last = num_layers if to_the_end else fields.count("moe_layer_end_index")
        return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in every)
    if isinstance(fields.raw("moe_layer_freq"), list):
        fields.skip(*_NUM_DENSE)
        return tuple(bool(mark) for mark in fields.counts("moe_layer_freq")[:num_layers])
    if fields.has("expert_layer_period"):
        period, offset = fields.number("expert_layer_period"), fields.count("expert_layer_offset")
        return tuple(layer % period == offset for layer in every)
    if fields.has("decoder_sparse_step", "interleave_moe_layer_step"):
        step = fields.number("decoder_sparse_step", "interleave_moe_layer_step")
        dense = set(fields.counts("mlp_only_layers"))
        return tuple((layer + 1) % step == 0 and layer not in dense for layer in every)
    first, step = fields.count(*_NUM_DENSE), fields.number_or(1, "moe_layer_freq")
    return tuple(layer >= first and layer % step == 0 for layer in every)


def _dense_size(fields: Fields) -> int:
    own = ("intermediate_size_mlp", "dense_intermediate_size")
    # Granite's hybrids call the MLP of their dense models the shared one.
    shared = () if fields.count(*_EXPERTS) else ("shared_intermediate_size",)
    name = next((name for name in (*own, *shared) if fields.has(name)), "intermediate_size")
    fields.skip(*shared, *(("intermediate_size",) if name in shared else ()))
    size = _mean(fields, name)
    if not size and family_of(fields.word("model_type")).plain_mlp:
        return 4 * fields.number("hidden_size")
    if not fields.flag("block_auto_adjust_ff_dim", False):
        return size
    # The size that two matrices would have, shared out to three.
    multiple = fields.number_or(1, "block_multiple_of")
    return -(-(2 * size // 3) // multiple) * multiple


def _mean(fields: Fields, *names: str) -> int:
    """A number, or the mean of a list with one for each layer; 0 when it is not given."""
    fields.skip(*names)
    name = next((name for name in names if fields.has(name)), names[0])
    if not isinstance(fields.raw(name), list):
        return fields.count(name)
    numbers = fields.counts(name)
    return sum(numbers) // max(1, len(numbers))


def _given(fields: Fields, *names: str) -> int:
    """The same, of what must be given."""
    return _mean(fields, *names) or fields.number(*names)


def _sparse(fields: Fields) -> int:
    """Router, chosen experts and shared experts of one layer."""
    hidden_size, latent_size = fields.number("hidden_size"), fields.count(*_LATENT_SIZE)
    expert_size = _given(fields, *_EXPERT_SIZE)
    chosen = _given(fields, *_CHOSEN) * _size(fields, expert_size, latent_size or hidden_size)
    router = hidden_size * fields.number(*_EXPERTS) + 2 * hidden_size * latent_size
    return router + chosen + _size(fields, _shared_size(fields, expert_size))


def _shared_size(fields: Fields, expert_size: int) -> int:
    if fields.has(*_SHARED_SIZE):
        return fields.count(*_SHARED_SIZE) * max(1, _mean(fields, *_SHARED_EXPERTS))
    # Llama 4 has one shared expert, and a field for the size of its dense layers.
    always = 1 if fields.has("intermediate_size_mlp") else 0
    return expert_size * (_mean(fields, *_SHARED_EXPERTS) or always)


def _size(fields: Fields, intermediate_size: int, hidden_size: int = 0) -> int:
    """Weights of one MLP: three matrices when it is gated, otherwise two."""
    activation = fields.word("mlp_hidden_act", "hidden_act", "hidden_activation")
    plain = activation == "relu2" or family_of(fields.word("model_type")).plain_mlp
    return (2 if plain else 3) * intermediate_size * (hidden_size or fields.number("hidden_size"))
