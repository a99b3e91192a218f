"""The packed slots of several stretches at once: what `staged` finds stretch by stretch, by sorting every row.

Only strips are sorted here, and rows are never listed. What takes time for a slot then is less its strips than the
number of calls; so these are made for some stretches together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.plan.programs.copies import Column
from kvferry.plan.programs.program import Section
from kvferry.plan.programs.request import Places
from kvferry.plan.programs.row_patterns import Tile
from kvferry.plan.routing.selection import Indices
from kvferry.plan.slots.contiguous_runs import Strips, strips_of
from kvferry.plan.strategy.strategies import RegionStarts, Side


class Packed(NamedTuple):
    """One stretch. Addresses in staging memory count from its beginning; one side may be left out."""

    gather: tuple[Tile, ...]
    scatter: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Strips at all their places, one column each: the stretch, where it begins and ends in the target's memory, its
    bytes, where its first run begins at this side, and which section with its places it is of."""

    stretch: Indices
    start: Column
    stop: Column
    num_bytes: Column
    address: Column
    number: Indices

    def in_order(self) -> _Placed:
        """As their bytes lie in slots."""
        order = np.lexsort((self.start, self.stretch))
        return _Placed(
            stretch=self.stretch[order],
            start=self.start[order],
            stop=self.stop[order],
            num_bytes=self.num_bytes[order],
            address=self.address[order],
            number=self.number[order],
        )

    @property
    def interleave(self) -> bool:
        """Whether one begins before the one before it ends: rows of both may lie among one another."""
        return bool(((self.stop[:-1] > self.start[1:]) & (self.stretch[:-1] == self.stretch[1:])).any())


def packed(places: Sequence[Places], num_stretches: int, starts: RegionStarts, side: Side) -> tuple[Packed, ...]:
    """What is gathered and scattered for each stretch.

    None at all where rows of several places may lie among one another, as those of single tokens do where heads lie
    outside of tokens, or where strips are not alike: rows have to be sorted one by one then.
    """
    found = [(section, each) for each in places for section in each.sections]
    nothing: tuple[tuple[Tile, ...], ...] = ((),) * num_stretches
    if not found:
        return tuple(map(Packed, nothing, nothing))
    gathers = nothing if side is Side.TARGET else _laid(found, num_stretches, starts, Side.SOURCE)
    scatters = nothing if side is Side.SOURCE else _laid(found, num_stretches, starts, Side.TARGET)
    return tuple(map(Packed, gathers, scatters)) if gathers and scatters else ()


def _laid(
    found: Sequence[tuple[Section, Places]], num_stretches: int, starts: RegionStarts, side: Side
) -> tuple[tuple[Tile, ...], ...]:
    """One side of each stretch; empty where rows have to be sorted."""
    strips = [each for section, _ in found if (each := strips_of(section, starts, side)) is not None]
    if len(strips) < len(found):
        return ()
    placed = _placed(found, strips, side).in_order()
    if placed.interleave:
        return ()
    offset = np.cumsum(placed.num_bytes) - placed.num_bytes
    border = np.searchsorted(placed.stretch, np.arange(num_stretches + 1)).tolist()
    tiles = []
    for first, last in pairwise(border):
        part = slice(first, last)
        begins = offset[part] - offset[first] if first < last else offset[part]
        tiles.append(tuple(_tiles(strips, placed.number[part], (placed.address[part], begins), side)))
    return tuple(tiles)


def _tiles(strips: Sequence[Strips], number: Indices, starts: tuple[Column, Column], side: Side) -> Iterator[Tile]:
    """The runs of some strips, which start at addresses and at offsets in staging memory; one tile for each section."""
    for this, each in enumerate(strips):
        which = slice(None) if len(strips) == 1 else np.flatnonzero(number == this)
        address, offset = (column[which] for column in starts)
        if not len(address):
            continue
        if side is Side.SOURCE:
            yield Tile(address, offset, each.run_address, each.run_skip, each.run_length)
        else:
            yield Tile(offset, address, each.run_skip, each.run_address, each.run_length)


def _placed(found: Sequence[tuple[Section, Places]], strips: Sequence[Strips], side: Side) -> _Placed:
    """All strips of all sections, in no order."""
    parts = []
    for number, ((section, places), each) in enumerate(zip(found, strips, strict=True)):
        strides, (block, slot) = section.strides, places.target
        moved = own = (block * strides.target_block + slot * strides.target_token).astype(np.uint64)
        if side is Side.SOURCE:
            block, slot = places.source
            own = (block * strides.source_block + slot * strides.source_token).astype(np.uint64)
        num_places, num_strips = len(moved), len(each.start)
        start = np.add.outer(each.start, moved).ravel()
        parts.append(
            (
                np.tile(places.stretch, num_strips),
                start,
                start + np.repeat(each.reach, num_places),
                np.full(len(start), each.num_bytes, np.uint64),
                np.add.outer(each.address, own).ravel(),
                np.full(len(start), number),
            )
        )
    return _Placed(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
