"""A pool with a slot for every request: the states of fixed size of linear attention and Mamba layers.

SGLang keeps a convolution state `[layer, slot, channel, width]` (Kimi's: `[layer, slot, width, channel]`) and a
recurrent state `[layer, slot, head, …]`. Ranks divide the heads, and each projection of the convolution by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvferry.connectors.sglang.description.parts import Component, Part, RankFacts, unsupported, word_of
from kvferry.layout import Axis, CacheGroup, Span, State


def recurrent(pool: Any, facts: RankFacts) -> Component:
    """All states of SGLang's `MambaPool`. Raises LayoutError for another pool, and for channels that cannot be told
    apart."""
    if type(pool).__name__ != "MambaPool":
        raise unsupported("this kind of pool cannot be described", type(pool).__name__)
    parts = [part for tensor in pool.mamba_cache.conv for part in _convolutions(pool, tensor, facts)]
    tensors = [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
    if tensors[-1].numel():
        parts += _recurrences(tensors[-1], pool, facts)
    buffers = frozenset(layer.data_ptr() for tensor in tensors if tensor.numel() for layer in tensor)
    return Component("mamba", CacheGroup(1, int(pool.size) + 1, 0), tuple(parts), buffers)


def _convolutions(pool: Any, tensor: torch.Tensor, facts: RankFacts) -> Iterator[Part]:
    """A state for each projection, which has some of the channels."""
    axis = 2 + int(pool.conv_slice_axis)
    first, width = 0, Axis("width", tensor.shape[5 - axis])
    for number, (total, local) in enumerate(_projections(pool, tensor.shape[axis], facts)):
        channels = tensor.narrow(axis, first, local).movedim(axis, 2)
        spans = (_share(total, local, facts), Span(0, width.extent))
        yield from _states(pool, channels, f"conv.{number}", (Axis("channel", total), width), spans)
        first += local


def _projections(pool: Any, num_channels: int, facts: RankFacts) -> list[tuple[int, int]]:
    """How many channels each projection has, over all ranks and on this one. Raises LayoutError."""
    ranks, groups = facts.tensor_parallel, pool.conv_shard_groups
    if groups is not None:
        found = [(int(total), int(total) // ranks) for total in groups]
    else:
        found = _of_mamba(pool, num_channels, facts)
    if sum(local for _, local in found) != num_channels or any(total < local for total, local in found):
        what = "the channels of its convolutions are not divided evenly among the ranks"
        raise unsupported(what, f"{num_channels} of {found} on each of {ranks} ranks")
    return found


def _of_mamba(pool: Any, num_channels: int, facts: RankFacts) -> list[tuple[int, int]]:
    """Channels of x, divided like heads, and of B and C, divided like groups. Every rank has a copy of a lone group."""
    ranks, temporal = facts.tensor_parallel, pool.mamba_cache.temporal
    if not temporal.numel():
        return [(num_channels * ranks, num_channels)]
    heads, head_dim, state_dim = temporal.shape[2:]
    x, (groups, rest) = heads * head_dim, divmod((num_channels - heads * head_dim) // 2, state_dim)
    if rest or (groups and ranks > 1 and facts.num_state_groups not in (1, groups * ranks)):
        total = facts.num_state_groups or "an unknown number"
        found = f"{groups} groups on each of {ranks} ranks, {total} in the model"
        raise unsupported("groups of its convolutions are not divided evenly among the ranks", found)
    copies = 1 if facts.num_state_groups == 1 else ranks
    b = groups * state_dim
    return [(x * ranks, x), *([(b * copies, b)] * 2 if b else [])]


def _recurrences(tensor: torch.Tensor, pool: Any, facts: RankFacts) -> Iterator[Part]:
    heads, *rest = tensor.shape[2:]
    axes = (Axis("head", heads * facts.tensor_parallel), *(Axis(f"dim{at}", size) for at, size in enumerate(rest)))
    spans = (_share(axes[0].extent, heads, facts), *(Span(0, size) for size in rest))
    yield from _states(pool, tensor, "ssm", axes, spans)


def _states(
    pool: Any, tensor: torch.Tensor, name: str, axes: tuple[Axis, ...], spans: tuple[Span, ...]
) -> Iterator[Part]:
    """Yield the state of each layer. The tensor is `[layer, slot, *axes]`."""
    item_bytes, strides = tensor.element_size(), tensor.stride()
    for layer, slots in zip(pool.mamba_layer_ids, tensor, strict=True):
        state = State(f"model.layers.{layer}.{name}", word_of(tensor.dtype), item_bytes, axes, False)
        in_slot = tuple(stride * item_bytes for stride in strides[2:])
        yield Part(state, slots, spans, in_slot, strides[1] * item_bytes)


def _share(total: int, local: int, facts: RankFacts) -> Span:
    start = 0 if total == local else facts.tensor_rank * local
    return Span(start, start + local)
