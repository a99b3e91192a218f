"""State-space layers of the first and second Mamba generation: states of fixed size instead of tokens.

A convolution over `mamba_d_conv` inputs keeps the last `mamba_d_conv - 1` of them, as vLLM stores it. The convolved
projections lie packed in one tensor there, but ranks share each of them in its own way, so each is a state here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.dtypes import Item
from kvferry.catalog.config.fields import Fields
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import Kept

_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_HEAD_DIM = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "mamba_num_groups", "n_groups")
_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_KERNEL = ("mamba_d_conv", "conv_kernel")
_EXPAND = ("mamba_expand", "expand")
_INNER = ("mamba_d_ssm", "mamba_d_inner")
_STEP_RANK = ("mamba_dt_rank", "time_step_rank")


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Sizes of a layer of the first generation; `step_rank` is that of the projection to time steps."""

    hidden_size: int
    num_channels: int
    state_dim: int
    kernel: int
    step_rank: int


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of a layer of the second generation: heads share the B and C of their group."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int


def is_mamba1(fields: Fields) -> bool:
    """Whether recurrent layers are Mamba 1, judged by the fields that only it has."""
    return fields.has(*_STATE) and not is_mamba2(fields)


def is_mamba2(fields: Fields) -> bool:
    """Whether recurrent layers are Mamba 2: state-space heads."""
    return fields.has(*_STATE) and fields.has(*_HEADS)


def mamba1_of(fields: Fields) -> Mamba1:
    """The sizes of every Mamba 1 layer of a config."""
    hidden_size = fields.number("hidden_size")
    return Mamba1(
        hidden_size,
        num_channels=_inner_size(fields, hidden_size),
        state_dim=fields.number(*_STATE),
        kernel=_kernel(fields),
        step_rank=fields.number_or(-(-hidden_size // 16), *_STEP_RANK),
    )


def mamba2_of(fields: Fields) -> Mamba2:
    """The sizes of every Mamba 2 layer of a config."""
    hidden_size, num_heads = fields.number("hidden_size"), fields.number(*_HEADS)
    num_groups = fields.number(*_GROUPS)
    fields.quotient(num_heads, num_groups, "the number of state-space heads per group")
    head_dim = fields.count(*_HEAD_DIM)
    return Mamba2(
        hidden_size,
        num_heads,
        head_dim or fields.quotient(_inner_size(fields, hidden_size), num_heads, "the inner size per head"),
        num_groups,
        state_dim=fields.number(*_STATE),
        kernel=_kernel(fields),
    )


def keep_mamba1(mamba: Mamba1, prefix: str, item: Item, recurrent: Item) -> tuple[Kept, ...]:
    """Convolution and state, both divided over the channels."""
    channel = Axis("channel", mamba.num_channels)
    return (
        fixed(f"{prefix}.conv", item, (channel, Axis("width", mamba.kernel - 1))),
        fixed(f"{prefix}.ssm", recurrent, (channel, Axis("state", mamba.state_dim))),
    )


def keep_mamba2(mamba: Mamba2, prefix: str, item: Item, recurrent: Item) -> tuple[Kept, ...]:
    """Convolved x, B and C, and the state. x and the state follow the heads; B and C follow the groups, so that
    ranks in excess of the groups hold copies of them."""
    head, head_dim = Axis("head", mamba.num_heads), Axis("head_dim", mamba.head_dim)
    group, state, width = (
        Axis("group", mamba.num_groups),
        Axis("state", mamba.state_dim),
        Axis("width", mamba.kernel - 1),
    )
    return (
        fixed(f"{prefix}.conv.x", item, (head, head_dim, width)),
        fixed(f"{prefix}.conv.b", item, (group, state, width)),
        fixed(f"{prefix}.conv.c", item, (group, state, width)),
        fixed(f"{prefix}.ssm", recurrent, (head, head_dim, state)),
    )


def mamba1_parameters(mamba: Mamba1) -> int:
    """Weights of the projections, the convolution and the state matrix."""
    projections = 3 * mamba.hidden_size + mamba.kernel + mamba.state_dim
    steps = 2 * mamba.step_rank + 2 * mamba.state_dim
    return mamba.num_channels * (projections + steps)


def mamba2_parameters(mamba: Mamba2) -> int:
    """Weights of the projections and the convolution."""
    inner, shared = mamba.num_heads * mamba.head_dim, 2 * mamba.num_groups * mamba.state_dim
    projections = mamba.hidden_size * (2 * inner + shared + mamba.num_heads + inner)
    return projections + (inner + shared) * mamba.kernel


def fixed(name: str, item: Item, axes: tuple[Axis, ...]) -> Kept:
    """A state of fixed size, divided along its first axis."""
    return Kept(State(name, item.dtype, item.num_bytes, axes, per_token=False), axes[0].name)


def _inner_size(fields: Fields, hidden_size: int) -> int:
    return fields.count(*_INNER) or fields.number(*_EXPAND) * hidden_size


def _kernel(fields: Fields) -> int:
    kernel = fields.number(*_KERNEL)
    if kernel < 2:
        raise fields.wrong(" or ".join(_KERNEL), kernel, "at least 2: a convolution over one input has no state")
    return kernel
