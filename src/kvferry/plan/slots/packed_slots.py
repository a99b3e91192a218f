"""The packed slots of several stretches at once: what `staged` finds stretch by stretch, by sorting every row.

The rows of a section are put together to strips where they lie side by side in the target's blocks, whatever block it
is. What is packed lies in the order of the target's addresses, and within a strip that order is known once for all
blocks: only the strips of a request are sorted, and rows are never listed. A slot then takes time less for its strips
than for the number of calls, so calls are made for some stretches together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.plan.programs.copies import Column, run_starts
from kvferry.plan.programs.program import RegionStarts, Section
from kvferry.plan.programs.request import Places
from kvferry.plan.programs.tiles import Tile
from kvferry.plan.routing.selection import Indices
from kvferry.plan.strategy.strategies import Side

# No strips are kept of larger sections: a peer decides how large they are.
KEPT_ROWS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Strips:
    """The strips of one section, as one side sees it.

    Strip i begins at the target's address `start[i]` in block 0, slot 0, and ends `reach[i]` bytes behind it;
    `num_bytes` of them are rows. At this side its first run begins at `address[i]` in block 0, slot 0; run j begins
    `run_address[j]` behind that, is `run_skip[j]` bytes of rows into the strip, and has `run_length[j]` bytes.
    """

    start: Column
    reach: Column
    num_bytes: int
    address: Column
    run_address: Column
    run_skip: Column
    run_length: Column


class _Placed(NamedTuple):
    """Strips at all their places, one column each: the stretch, where it begins and ends in the target's memory, its
    bytes, where its first run begins at this side, and which section with its places it is of."""

    stretch: Indices
    start: Column
    stop: Column
    num_bytes: Column
    address: Column
    number: Indices

    @property
    def interleave(self) -> bool:
        """Whether one begins before the one before it ends: rows of both may lie among one another."""
        return bool(((self.stop[:-1] > self.start[1:]) & (self.stretch[:-1] == self.stretch[1:])).any())


def packed(
    places: Sequence[Places], num_stretches: int, starts: RegionStarts, side: Side
) -> tuple[tuple[Tile, ...], ...]:
    """What one side gathers or scatters for each stretch. Addresses in staging memory count from its beginning.

    Empty where rows of several places may lie among one another, as those of single tokens do where heads lie outside
    of tokens, or where strips are not alike: rows have to be sorted one by one then.
    """
    found = [(section, each) for each in places for section in each.sections]
    if not found:
        return ((),) * num_stretches
    strips = [each for section, _ in found if (each := strips_of(section, starts, side)) is not None]
    if len(strips) < len(found):
        return ()
    placed = _placed(found, strips, side)
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
    """All strips of all sections, as their bytes lie in slots."""
    parts = []
    for number, ((section, places), each) in enumerate(zip(found, strips, strict=True)):
        shifts = own = section.strides.target.shifts(places.target)
        if side is Side.SOURCE:
            own = section.strides.source.shifts(places.source)
        num_places, num_strips = len(shifts), len(each.start)
        start = np.add.outer(each.start, shifts).ravel()
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
    stretch, start, *others = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((start, stretch))
    return _Placed(*(column[order] for column in (stretch, start, *others)))


def strips_of(section: Section, starts: RegionStarts, side: Side) -> Strips | None:
    """The strips of a section, or None where the runs of two strips differ, as in no format that engines have. Runs
    never cross the border of a region; `starts` are those of the layouts that the section was bound to."""
    find = _known if len(section) <= KEPT_ROWS else _strips_of
    return find(section, starts, side)


def _strips_of(section: Section, starts: RegionStarts, side: Side) -> Strips | None:
    order = np.argsort(section.target, kind="stable")
    target, length = section.target[order], np.uint64(section.length)
    address, borders = (target, starts.target) if side is Side.TARGET else (section.source[order], starts.source)
    # What is as far away as the next block may have rows of that one in between.
    first = run_starts(np.diff(target) < np.uint64(max(section.strides.target.block, section.length)))
    follows = (address[:-1] + length == address[1:]) & ~np.isin(address[1:], borders)
    follows[first[1:] - 1] = False
    run = run_starts(follows)
    if len(run) % len(first):
        return None
    shape = len(first), len(run) // len(first)
    begins, rows = address[run].reshape(shape), np.diff(run, append=len(target)).reshape(shape)
    runs = begins - begins[:, :1], run.reshape(shape) - first[:, np.newaxis], rows
    if any((column != column[0]).any() for column in runs):
        return None
    run_address, skip, num_rows = (column[0].astype(np.uint64) for column in runs)
    last = first + int(num_rows.sum()) - 1
    return Strips(
        start=target[first],
        reach=target[last] + length - target[first],
        num_bytes=int(num_rows.sum()) * section.length,
        address=address[first],
        run_address=run_address,
        run_skip=skip * length,
        run_length=num_rows * length,
    )


_known = lru_cache(maxsize=64)(_strips_of)
