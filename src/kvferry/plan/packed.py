"""The packed slots of several stretches at once: what `staged` finds stretch by stretch, by sorting every row.

What takes time for a slot is less its rows than the number of calls; so these are made for some stretches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.copies import NOTHING, Column, Copies
from kvferry.plan.program import Section
from kvferry.plan.request import Places
from kvferry.plan.staged import RegionStarts, Side, Stages, join, pack_laid
from kvferry.plan.strips import Strips, strips_of

__all__ = ["packed"]

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Strips at all their places, one column each: the stretch, where it begins and ends in the target's memory, its
    bytes, its runs (the number of the first, and how many), and how far these have moved with their block."""

    stretch: Counts
    start: Column
    stop: Column
    num_bytes: Column
    first_run: Counts
    num_runs: Counts
    shift: Column

    def in_order(self) -> _Placed:
        """As their bytes lie in slots."""
        order = np.lexsort((self.start, self.stretch))
        return _Placed(
            stretch=self.stretch[order],
            start=self.start[order],
            stop=self.stop[order],
            num_bytes=self.num_bytes[order],
            first_run=self.first_run[order],
            num_runs=self.num_runs[order],
            shift=self.shift[order],
        )

    @property
    def interleave(self) -> bool:
        """Whether one begins before the one before it ends: rows of both may lie among one another."""
        return bool(((self.stop[:-1] > self.start[1:]) & (self.stretch[:-1] == self.stretch[1:])).any())

    def runs(self, column: Column, shift: Column) -> Column:
        """A column that has a number for each run, for all runs of all strips; each strip adds a number of its own."""
        width = int(self.num_runs[0])
        if (self.num_runs == width).all():
            # Nearly always; in a third of the time.
            spread: Column = np.add(column.reshape(-1, width)[self.first_run // width], shift[:, np.newaxis]).ravel()
            return spread
        last = np.cumsum(self.num_runs)
        run = np.arange(last[-1]) + np.repeat(self.first_run - (last - self.num_runs), self.num_runs)
        found: Column = column[run] + np.repeat(shift, self.num_runs)
        return found


def packed(
    places: Sequence[Places], num_bytes: Sequence[int], starts: RegionStarts, slot_bytes: int, side: Side
) -> tuple[Stages, ...]:
    """The stages of each stretch, of which `num_bytes` move; staging addresses count from its beginning.

    None at all where rows of several places may lie among one another, as those of single tokens do where heads lie
    outside of tokens: they have to be sorted one by one.
    """
    sides = [each for each in (Side.SOURCE, Side.TARGET) if side in (each, Side.BOTH)]
    laid = {each: _laid(places, num_bytes, starts, each) for each in sides}
    if not all(laid.values()):
        return ()
    nothing = (NOTHING,) * len(num_bytes)
    stages = zip(laid.get(Side.SOURCE, nothing), laid.get(Side.TARGET, nothing), num_bytes, strict=True)
    return tuple(pack_laid(*each, slot_bytes) for each in stages)


def _laid(places: Sequence[Places], num_bytes: Sequence[int], starts: RegionStarts, side: Side) -> tuple[Copies, ...]:
    """One side of each stretch: from its addresses to offsets in staging memory. Empty where strips interleave."""
    found = [(section, each) for each in places for section in each.sections]
    if not found:
        return (NOTHING,) * len(num_bytes)
    strips = [strips_of(section, starts, side) for section, _ in found]
    placed = _placed(found, strips, side).in_order()
    if placed.interleave:
        return ()
    address = placed.runs(np.concatenate([each.address for each in strips]), placed.shift)
    begins = np.cumsum(placed.num_bytes) - placed.num_bytes
    offset = placed.runs(np.concatenate([each.skip for each in strips]), begins)
    strip = np.searchsorted(placed.stretch, np.arange(len(num_bytes) + 1))
    rows, totals = np.append(0, np.cumsum(placed.num_runs))[strip].tolist(), [0, *accumulate(num_bytes)]
    borders = starts.source if side is Side.SOURCE else starts.target
    return tuple(
        join(address[first:last], offset[first:last] - np.uint64(total), size, borders)
        for (first, last), total, size in zip(pairwise(rows), totals, num_bytes, strict=False)
    )


def _placed(found: Sequence[tuple[Section, Places]], strips: Sequence[Strips], side: Side) -> _Placed:
    """All strips of all sections, in no order. Runs are numbered through."""
    parts, num_runs = [], 0
    for (section, places), each in zip(found, strips, strict=True):
        strides, (block, slot) = section.strides, places.target
        moved = (block * strides.target_block + slot * strides.target_token).astype(np.uint64)
        own = moved
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
                np.repeat(each.num_bytes, num_places),
                np.repeat(each.first_run + num_runs, num_places),
                np.repeat(each.num_runs, num_places),
                np.tile(own, num_strips),
            )
        )
        num_runs += len(each.address)
    return _Placed(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
