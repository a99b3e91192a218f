"""What is taken out of an array at a time: it is seen as one long row of units of so many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.programs.copies import Column
from kvferry.transport.registered_memory import Offsets

SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Programs are compiled for so many units; other numbers are several calls, of which the last may be padded."""
MIN_BYTES, MAX_BYTES = 64 << 10, 32 << 20
"""A call that is padded to the first costs next to nothing. Only one unit may be more than the second."""

MAX_UNITS = (1 << 31) - 1
"""Programs number units in 32 bits."""


def units_of(layout: Layout, region: int) -> tuple[int, ...]:
    """The units of a region in bytes, the larger first: a block; what no engine divides, such as a vector of one head
    and token; and an element, for rows that the end of a slot cuts, or several where there are too many. None where
    there are too many blocks."""
    states, size_bytes = layout.state_named(), layout.regions[region].size_bytes
    block = vector = element = size_bytes
    for placement in (each for each in layout.placements if each.region == region):
        state = states[placement.state]
        block = gcd(block, placement.block_stride, placement.offset)
        vector = gcd(vector, _undivided(state, placement))
        element = gcd(element, state.item_bytes)
    found = {block, vector, _smallest(vector, element, size_bytes)}
    return tuple(sorted((unit for unit in found if size_bytes // unit < MAX_UNITS), reverse=True))


def _smallest(vector: int, element: int, size_bytes: int) -> int:
    """An element; where programs cannot number so many, two of them or four and so on, of which vectors still consist:
    slots of staging memory end at multiples of a power of two."""
    unit = element
    while size_bytes // unit >= MAX_UNITS and vector % (2 * unit) == 0:
        unit *= 2
    return unit


def _undivided(state: State, placement: Placement) -> int:
    """The bytes of a contiguous axis, else of an element; a divisor of them where other distances are no multiples."""
    steps = zip(placement.strides, placement.spans, strict=True)
    inner = next((stride * len(span) for stride, span in steps if stride == state.item_bytes), state.item_bytes)
    return gcd(inner, placement.offset, placement.block_stride, placement.token_stride, *_beyond(placement, inner))


def _beyond(placement: Placement, inner: int) -> list[int]:
    return [stride for stride in placement.strides if stride >= inner]


def sizes_of(unit_bytes: int) -> tuple[int, ...]:
    """The numbers of units that programs are compiled for, ascending."""
    useful = (size for size in SIZES if 4 * size * unit_bytes > MIN_BYTES or size == SIZES[-1])
    return tuple(size for size in useful if size * unit_bytes <= MAX_BYTES) or SIZES[:1]


def size_for(num_units: int, unit_bytes: int) -> int:
    """The smallest of `sizes_of` that is enough."""
    return next(size for size in sizes_of(unit_bytes) if size >= num_units)


def calls_for(num_units: int, unit_bytes: int) -> Iterator[slice]:
    """The units of each call. None is padded to more than twice what it has, except to the smallest size."""
    first, sizes = 0, sizes_of(unit_bytes)
    while first < num_units:
        left = num_units - first
        size = next((size for size in reversed(sizes) if left >= size or (left > size // 2)), sizes[0])
        yield slice(first, first + min(size, left))
        first += size


def unit_for(offset: Column, length: Column, units: tuple[int, ...]) -> int:
    """The largest unit of which all rows consist. Raises TransportError if none is."""
    for unit in units:
        remains = (offset | length) % unit if unit & (unit - 1) == 0 else (offset % unit) + (length % unit)
        if not remains.any():
            return unit
    row = int(np.flatnonzero(remains)[0])
    raise TransportError(
        "an array of JAX cannot be cut into these rows",
        found=f"{int(length[row])} bytes at offset {int(offset[row])}",
        expected=f"multiples of {units[-1]} bytes",
    )


def numbered(offset: Column, length: Column, unit: int) -> tuple[Offsets, Offsets, Offsets]:
    """The units of rows, one by one: the number of each, its row, and which of that row it is."""
    counts = (length // unit).astype(np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return (offset // unit).astype(np.int64)[row] + place, row, place
