"""From SGLang's pools to our description of the rank.

A pool keeps rows `[slot, head, dim]` per layer, keys and values apart, or one latent row per slot. A page is as many
slots that follow one another as it has tokens; page 0 takes what is written for padding. SGLang addresses pages, which
are our blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry import Memory
from kvferry.errors import LayoutError
from kvferry.layout import Axis, CacheGroup, Layout, Placement, Region, Span, State, shares


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a pool does not know: its place among the tensor-parallel ranks, and the model's heads over all of them."""

    tensor_rank: int
    tensor_parallel: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """One state of one layer: its rows, and the axes of a row."""

    name: str
    rows: torch.Tensor
    axes: tuple[Axis, ...]
    spans: tuple[Span, ...]


def describe(pool: Any, facts: RankFacts) -> tuple[Layout, tuple[Memory, ...]]:
    """The layout of a rank's pool, and the memory to register: one region per allocation.

    Raises LayoutError for a pool that cannot be described, naming it.
    """
    found = tuple(_states(pool, facts))
    if not found:
        raise LayoutError("the pool of this rank keeps no layer", found=type(pool).__name__)
    dtype = str(pool.dtype).removeprefix("torch.")
    regions: dict[int, Region] = {}
    placements = [_placement(rows, regions, int(pool.page_size)) for rows in found]
    states = tuple(State(each.name, dtype, each.rows.element_size(), each.axes, True) for each in found)
    num_blocks = min(each.rows.shape[0] for each in found) // int(pool.page_size)
    # SGLang gives the last page of a request to nobody else, and writes a slot before it reads it.
    group = CacheGroup(int(pool.page_size), num_blocks, 0, tail_is_free=True)
    layout = Layout(states, tuple(regions.values()), (group,), tuple(placements))
    return layout, tuple(Memory(region.address, region.size_bytes, -1) for region in regions.values())


def check_describable(kv_args: Any) -> None:
    """Refuse what lies beside the pool of keys and values. Raises LayoutError."""
    if kv_args.state_types:
        kinds = ", ".join(str(kind.value) for kind in kv_args.state_types)
        raise _unsupported("states beside keys and values cannot be moved from SGLang yet", kinds)
    if kv_args.num_draft_entries:
        raise _unsupported("the cache of a draft model cannot be moved from SGLang yet", f"{kv_args.num_draft_entries}")


def _states(pool: Any, facts: RankFacts) -> Iterator[_Rows]:
    """By the exact class: another pool may arrange its memory in any way."""
    match type(pool).__name__:
        case "MHATokenToKVPool":
            yield from _keys_and_values(pool, facts)
        case "MLATokenToKVPool":
            for layer, rows in _numbered(pool, pool.kv_buffer):
                dim = rows.shape[-1]
                yield _Rows(f"model.layers.{layer}.latent", rows, (Axis("dim", dim),), (Span(0, dim),))
        case name:
            raise _unsupported("this kind of pool cannot be described", name)


def _keys_and_values(pool: Any, facts: RankFacts) -> Iterator[_Rows]:
    if pool.kv_cache_layout != "nhd":
        raise _unsupported("rows of a page are not arranged token by token", pool.kv_cache_layout)
    span = shares(facts.num_heads, facts.tensor_parallel, "axis head")[facts.tensor_rank]
    if pool.head_num != span.stop - span.start:
        found = f"{pool.head_num} heads on each of {facts.tensor_parallel} ranks, {facts.num_heads} in the model"
        raise _unsupported("its heads are not divided evenly among the ranks", found)
    for (layer, keys), (_, values) in zip(_numbered(pool, pool.k_buffer), _numbered(pool, pool.v_buffer), strict=True):
        for kind, rows in (("k", keys), ("v", values)):
            dim = rows.shape[-1]
            axes = (Axis("head", facts.num_heads), Axis("dim", dim))
            yield _Rows(f"model.layers.{layer}.{kind}", rows, axes, (span, Span(0, dim)))


def _numbered(pool: Any, buffers: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Layers by their number in the model; a pipeline stage has some of them."""
    return enumerate(buffers, int(pool.start_layer))


def _placement(each: _Rows, regions: dict[int, Region], page_size: int) -> Placement:
    rows, item_bytes = each.rows, each.rows.element_size()
    if rows.stride(-1) != 1:
        raise _unsupported("the elements of a row are not contiguous", f"{each.name}: strides {rows.stride()}")
    storage = rows.untyped_storage()
    start = storage.data_ptr()
    if start not in regions:
        device = rows.device
        kind = "dram" if device.type == "cpu" else "vram"
        regions[start] = Region(start, storage.nbytes(), kind, device.index or 0)
    token_stride = rows.stride(0) * item_bytes
    # The heads of a latent row are one, which is no axis.
    strides = tuple(stride * item_bytes for stride in rows.stride()[-len(each.axes) :])
    return Placement(
        state=each.name,
        region=list(regions).index(start),
        group=0,
        offset=rows.data_ptr() - start,
        spans=each.spans,
        strides=strides,
        block_stride=token_stride * page_size,
        token_stride=token_stride,
    )


def _unsupported(what: str, found: str) -> LayoutError:
    hint = "use SGLang's own backend for this model: --disaggregation-transfer-backend nixl"
    return LayoutError(what, found=found, hint=hint)
