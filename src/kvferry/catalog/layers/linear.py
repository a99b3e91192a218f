"""Linear attention, which keeps a matrix per head instead of tokens: gated delta nets (also Kimi's), and lightning
attention. And short convolutions."""

from __future__ import annotations

from kvferry.catalog.config.dtypes import FLOAT32, Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.mixer import RECURRENT, Mixer, fixed, kernel_of
from kvferry.plan.description.layout import Axis
from kvferry.plan.description.model import Kept

LIGHTNING = ("attn_type_list", "layer_group_size", "linear_attn_alpha_factor")
"""Fields of models whose linear attention is lightning attention, where none says that it is another."""


def delta_net(fields: Fields, item: Item, recurrent: Item) -> Mixer:
    """A gated delta net: its states, and the weights of the projections, the gates and the convolution."""
    num_key_heads, num_value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    fields.quotient(num_value_heads, num_key_heads, "the number of value heads per key head")
    hidden_size = fields.number("hidden_size")
    key, value = (
        (Axis("head", num_key_heads), Axis("key_dim", fields.number("linear_key_head_dim"))),
        (Axis("head", num_value_heads), Axis("value_dim", fields.number("linear_value_head_dim"))),
    )
    kernel = kernel_of(fields, "linear_conv_kernel_dim")
    keys, values = (heads.extent * dim.extent for heads, dim in (key, value))
    gates = hidden_size * (values + 2 * num_value_heads)
    num_parameters = 2 * hidden_size * (keys + values) + gates + (2 * keys + values) * kernel
    return Mixer(RECURRENT, num_parameters, _kept(key, value, kernel, item, recurrent))


def kimi_delta_net(fields: Fields, item: Item) -> Mixer:
    """Kimi's delta attention, whose matrices vLLM keeps in float32. The gate of what is forgotten is of low rank; so is
    that of the output where the config says nothing else."""
    own = fields.inner("linear_attn_config") if fields.has("linear_attn_config") else fields
    if own is not fields:
        # Its class in transformers says the same once more.
        fields.skip("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    num_heads = own.number("num_heads", "linear_num_heads", "num_attention_heads")
    dim = own.number("head_dim", "linear_head_dim")
    kernel = kernel_of(own, "short_conv_kernel_size", "linear_conv_kernel_dim")
    hidden_size, inner, head = fields.number("hidden_size"), num_heads * dim, Axis("head", num_heads)
    low_rank = dim * (hidden_size + inner)
    output_gate = hidden_size * inner if own.flag("use_full_rank_gate", False) else low_rank
    gates = low_rank + output_gate + hidden_size * num_heads
    num_parameters = 4 * hidden_size * inner + gates + 3 * inner * kernel
    key, value = (head, Axis("key_dim", dim)), (head, Axis("value_dim", dim))
    return Mixer(RECURRENT, num_parameters, _kept(key, value, kernel, item, FLOAT32))


def lightning_attention(fields: Fields, item: Item) -> Mixer:
    """A decaying sum of key times value for each query head, in the model's element as vLLM 0.32 keeps it; weights of
    queries, keys, values, gates and the output."""
    hidden_size, num_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    dim = fields.count("head_dim") or fields.quotient(hidden_size, num_heads, "hidden_size per head")
    fields.skip("block_size", "block")  # how many tokens are computed at a time
    axes = (Axis("head", num_heads), Axis("key_dim", dim), Axis("value_dim", dim))
    return Mixer(RECURRENT, 5 * hidden_size * num_heads * dim, (fixed("kv", item, axes),))


def short_convolution(fields: Fields, item: Item) -> Mixer:
    """A gated convolution, the whole mixer of a layer: the inputs that the next token's still needs, divided over the
    channels; weights of the projections and the convolution."""
    hidden_size, kernel = fields.number("hidden_size"), kernel_of(fields, "conv_L_cache")
    axes = (Axis("channel", hidden_size), Axis("width", kernel - 1))
    return Mixer(RECURRENT, hidden_size * (4 * hidden_size + kernel), (fixed("conv", item, axes),))


def _kept(
    key: tuple[Axis, Axis], value: tuple[Axis, Axis], kernel: int, item: Item, recurrent: Item
) -> tuple[Kept, ...]:
    """Convolved queries, keys and values, and the matrix per value head; all divided over the heads."""
    width = Axis("width", kernel - 1)
    return (
        fixed("conv.q", item, (*key, width)),
        fixed("conv.k", item, (*key, width)),
        fixed("conv.v", item, (*value, width)),
        fixed("ssm", recurrent, (*value, key[1])),
    )
