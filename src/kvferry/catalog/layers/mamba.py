"""State-space layers of the first and second Mamba generation: states of fixed size instead of tokens.

A convolution over `mamba_d_conv` inputs keeps the last `mamba_d_conv - 1` of them, as vLLM stores it. The convolved
projections lie packed in one tensor there, but ranks share each of them in its own way, so each is a state here.
"""

from __future__ import annotations

from kvferry.catalog.config.dtypes import Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.mixer import RECURRENT, Mixer, fixed, kernel_of
from kvferry.plan.description.layout import Axis

HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_HEAD_DIM = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "mamba_num_groups", "n_groups")
STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_KERNEL = ("mamba_d_conv", "conv_kernel")
_EXPAND = ("mamba_expand", "expand")
_INNER = ("mamba_d_ssm", "mamba_d_inner")
_STEP_RANK = ("mamba_dt_rank", "time_step_rank")


def mamba1(fields: Fields, item: Item, recurrent: Item) -> Mixer:
    """Convolution and state, both divided over the channels; weights of the projections, the convolution and the state
    matrix."""
    hidden_size = fields.number("hidden_size")
    num_channels, state_dim = _inner_size(fields, hidden_size), fields.number(*STATE)
    kernel = kernel_of(fields, *_KERNEL)
    step_rank = fields.number_or(-(-hidden_size // 16), *_STEP_RANK)
    channel = Axis("channel", num_channels)
    kept = (
        fixed("conv", item, (channel, Axis("width", kernel - 1))),
        fixed("ssm", recurrent, (channel, Axis("state", state_dim))),
    )
    projections, steps = 3 * hidden_size + kernel + state_dim, 2 * step_rank + 2 * state_dim
    return Mixer(RECURRENT, num_channels * (projections + steps), kept)


def mamba2(fields: Fields, item: Item, recurrent: Item) -> Mixer:
    """Convolved x, B and C, and the state; weights of the projections and the convolution.

    x and the state follow the heads. Heads share the B and C of their group; these follow the groups, so that ranks in
    excess of the groups hold copies of them.
    """
    hidden_size, num_heads = fields.number("hidden_size"), fields.number(*HEADS)
    num_groups = fields.number(*_GROUPS)
    fields.quotient(num_heads, num_groups, "the number of state-space heads per group")
    per_head = fields.count(*_HEAD_DIM)
    # Heads and their size say it already.
    fields.skip(*_INNER, *_EXPAND)
    per_head = per_head or fields.quotient(_inner_size(fields, hidden_size), num_heads, "the inner size per head")
    state_dim, kernel = fields.number(*STATE), kernel_of(fields, *_KERNEL)
    head, head_dim, group = Axis("head", num_heads), Axis("head_dim", per_head), Axis("group", num_groups)
    state, width = Axis("state", state_dim), Axis("width", kernel - 1)
    kept = (
        fixed("conv.x", item, (head, head_dim, width)),
        fixed("conv.b", item, (group, state, width)),
        fixed("conv.c", item, (group, state, width)),
        fixed("ssm", recurrent, (head, head_dim, state)),
    )
    inner, shared = num_heads * per_head, 2 * num_groups * state_dim
    projections = hidden_size * (3 * inner + shared + num_heads)
    return Mixer(RECURRENT, projections + (inner + shared) * kernel, kept)


def _inner_size(fields: Fields, hidden_size: int) -> int:
    fields.skip(*_EXPAND)
    return fields.count(*_INNER) or fields.number(*_EXPAND) * hidden_size
