"""The pool of blocks that all cache groups share: moved into shared memory where it lies in the host, and described."""

from __future__ import annotations

from typing import Any

import torch

from kvferry import Memory, SharedMemory, allocate_shared
from kvferry.errors import ConfigurationError, LayoutError, TransportError
from kvferry.layout import Axis, CacheGroup, Layout, Placement, Region, Span, State

STATES_PER_LAYER = 2
"""A layer has keys and values."""


def share_pool(cache: Any) -> SharedMemory:
    """Move the pool into memory that other processes can map."""
    try:
        memory = allocate_shared(cache.cache_tensor.numel(), "kvferry-cache")
    except TransportError as error:
        raise ConfigurationError(error.what, found=error.found, hint="lower num_blocks") from error
    shared = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    kept_bytes = cache.num_sectors * cache.bytes_per_sector
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(cache.bytes_per_sector, kept_bytes, shared, cache.pool)
    cache.cache_tensor = shared
    return memory


def forget_layers(cache: Any, numbers: frozenset[int]) -> None:
    """Forget the pages of layers in which nothing is written. Were one ever asked for, upstream would not find it, and
    the engine would end: a page that is read without being moved would make wrong tokens."""
    for allocator in cache.cache_allocators.values():
        for number in numbers & allocator._kv_token_views.keys():
            del allocator._kv_token_views[number]


def ring_tokens(allocator: Any) -> int:
    return int(getattr(allocator, "sliding_window", 0))


def layout_of(allocators: list[Any], memory: Memory, device: torch.device) -> Layout:
    """Where every element of the cache lies, states in the order in which their layers compute them. Raises LayoutError
    when upstream's views contradict themselves."""
    kind = "dram" if device.type == "cpu" else "vram"
    states = {number: found for allocator in allocators for number, found in _states(allocator).items()}
    return Layout(
        states=tuple(state for number in sorted(states) for state in states[number]),
        regions=(Region(memory.address, memory.size_bytes, kind, device.index or 0),),
        groups=tuple(_group(allocator, memory.size_bytes) for allocator in allocators),
        placements=tuple(p for allocator in allocators for p in _placements(allocator, memory.address)),
    )


def owning_layers(allocators: list[Any]) -> list[int]:
    """The numbers of the layers that have a cache of their own, ascending."""
    return sorted(int(number) for allocator in allocators for number in allocator._kv_token_views)


def _group(allocator: Any, size_bytes: int) -> CacheGroup:
    """An allocator's cache group. Block ids count from the pool's start, sectors that are never given away included."""
    return CacheGroup(allocator.tokens_per_page, size_bytes // allocator.bytes_per_block, ring_tokens(allocator))


def _states(allocator: Any) -> dict[int, list[State]]:
    """Return the states of each layer, by the number of the layer."""
    axes = (Axis("head", allocator.num_key_value_heads), Axis("dim", allocator.head_dim))
    dtype = str(allocator.cache_dtype).removeprefix("torch.")
    item_bytes, window = allocator.cache_dtype.itemsize, ring_tokens(allocator)
    return {
        number: [State(name, dtype, item_bytes, axes, per_token=True, window_tokens=window) for name, _ in pair]
        for number, pair in _views(allocator).items()
    }


def _views(allocator: Any) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """Each state's view of the pool, shaped (row, head, dim), by layer; a token of a block is a row."""
    return {
        int(number): [(f"model.layers.{number}.{part}", view) for part, view in zip("kv", pair, strict=True)]
        for number, pair in allocator._kv_token_views.items()
    }


def _placements(allocator: Any, base: int) -> list[Placement]:
    item_bytes = allocator.cache_dtype.itemsize
    spans = (Span(0, allocator.num_key_value_heads), Span(0, allocator.head_dim))
    placements = []
    for name, view in (named for pair in _views(allocator).values() for named in pair):
        row, head, dim = (stride * item_bytes for stride in view.stride())
        block = allocator.block_physical_stride * row
        if block != allocator.bytes_per_block or tuple(view.shape[1:]) != tuple(map(len, spans)):
            raise LayoutError(
                f"the engine's view of {name} does not fit its blocks",
                found=f"{block} bytes per block, {tuple(view.shape[1:])} per token",
                expected=f"{allocator.bytes_per_block} bytes per block, {tuple(map(len, spans))} per token",
                hint="this release of transformers lays out its cache in a way that kvferry does not know",
            )
        offset = view.data_ptr() - base
        placements.append(Placement(name, 0, allocator.index, offset, spans, (head, dim), block, row))
    return placements
