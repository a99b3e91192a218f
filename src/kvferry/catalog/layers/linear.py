"""Linear attention with a matrix per head instead of tokens: gated delta nets (also Kimi's) and short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.dtypes import FLOAT32, Item, recurrent_item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.mamba import fixed
from kvferry.plan.description.layout import Axis
from kvferry.plan.description.model import Kept


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Heads and dimensions over all ranks. `gate_rank` is that of the projections to the gates; 0: a full matrix."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    gate_rank: int
    recurrent: Item


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated convolution over the last `kernel` tokens, the whole mixer of a layer."""

    hidden_size: int
    kernel: int


def is_delta_net(fields: Fields) -> bool:
    """Whether recurrent layers are gated delta nets."""
    return fields.has("linear_num_value_heads")


def is_kimi_delta_net(fields: Fields) -> bool:
    """Whether recurrent layers are Kimi's delta attention."""
    return fields.has("linear_attn_config", "linear_num_heads")


def delta_net_of(fields: Fields) -> DeltaNet:
    """The sizes of every gated delta net of a config."""
    num_key_heads, num_value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    fields.quotient(num_value_heads, num_key_heads, "the number of value heads per key head")
    return DeltaNet(
        fields.number("hidden_size"),
        num_key_heads,
        num_value_heads,
        fields.number("linear_key_head_dim"),
        fields.number("linear_value_head_dim"),
        _kernel(fields, "linear_conv_kernel_dim"),
        gate_rank=0,
        recurrent=recurrent_item(fields),
    )


def kimi_delta_net_of(fields: Fields) -> DeltaNet:
    """The sizes of Kimi's delta attention, whose matrices vLLM keeps in float32 and whose gates are of low rank."""
    own = fields.inner("linear_attn_config") if fields.has("linear_attn_config") else fields
    num_heads, dim = own.number("num_heads", "linear_num_heads"), own.number("head_dim", "linear_head_dim")
    kernel = _kernel(own, "short_conv_kernel_size", "linear_conv_kernel_dim")
    return DeltaNet(fields.number("hidden_size"), num_heads, num_heads, dim, dim, kernel, dim, FLOAT32)


def keep_delta_net(net: DeltaNet, prefix: str, item: Item) -> tuple[Kept, ...]:
    """Convolved queries, keys and values, and the matrix per value head; all divided over the heads."""
    key_head, value_head = Axis("head", net.num_key_heads), Axis("head", net.num_value_heads)
    key_dim, value_dim, width = (
        Axis("key_dim", net.key_dim),
        Axis("value_dim", net.value_dim),
        Axis("width", net.kernel - 1),
    )
    return (
        fixed(f"{prefix}.conv.q", item, (key_head, key_dim, width)),
        fixed(f"{prefix}.conv.k", item, (key_head, key_dim, width)),
        fixed(f"{prefix}.conv.v", item, (value_head, value_dim, width)),
        fixed(f"{prefix}.ssm", net.recurrent, (value_head, value_dim, key_dim)),
    )


def delta_net_parameters(net: DeltaNet) -> int:
    """Weights of the projections, the gates and the convolution."""
    keys, values = net.num_key_heads * net.key_dim, net.num_value_heads * net.value_dim
    if net.gate_rank:
        gates = 2 * net.gate_rank * (net.hidden_size + values) + net.hidden_size * net.num_value_heads
    else:
        gates = net.hidden_size * (values + 2 * net.num_value_heads)
    return net.hidden_size * (2 * keys + 2 * values) + gates + (2 * keys + values) * net.kernel


def short_convolution_of(fields: Fields) -> ShortConvolution:
    """The sizes of every short convolution of a config."""
    return ShortConvolution(fields.number("hidden_size"), _kernel(fields, "conv_L_cache"))


def keep_short_convolution(convolution: ShortConvolution, prefix: str, item: Item) -> tuple[Kept, ...]:
    """The inputs that the next token's convolution still needs, divided over the channels."""
    axes = (Axis("channel", convolution.hidden_size), Axis("width", convolution.kernel - 1))
    return (fixed(f"{prefix}.conv", item, axes),)


def short_convolution_parameters(convolution: ShortConvolution) -> int:
    """Weights of the projections and the convolution."""
    return convolution.hidden_size * (4 * convolution.hidden_size + convolution.kernel)


def _kernel(fields: Fields, *names: str) -> int:
    kernel = fields.number(*names)
    if kernel < 2:
        raise fields.wrong(" or ".join(names), kernel, "at least 2: a convolution over one input has no state")
    return kernel
