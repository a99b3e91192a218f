"""The free bytes of an arena, as extents in the order of their addresses, none touching another. Pure integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple


class Extent(NamedTuple):
    """Bytes `start <= offset < stop` of an arena."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


EMPTY = Extent(0, 0)


class FreeList:
    """The free extents of `size_bytes`; at first all of it is free. An extent is freed as it was allocated."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.extents: list[Extent] = [Extent(0, size_bytes)]

    @property
    def free_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents)

    def best_fit(self, num_bytes: int, excluding: Extent = EMPTY) -> Extent | None:
        """The beginning of the smallest free extent that is large enough, the lowest of equals; None when there is
        none. Bytes of `excluding` count as not free."""
        fitting = (part for part in self._without(excluding) if part.num_bytes >= num_bytes)
        best = min(fitting, key=_size_then_start, default=None)
        return None if best is None else Extent(best.start, best.start + num_bytes)

    def largest_bytes(self, excluding: Extent = EMPTY) -> int:
        """The most bytes for which `best_fit` finds an extent."""
        return max((part.num_bytes for part in self._without(excluding)), default=0)

    def allocate(self, wanted: Extent) -> None:
        """Take an extent that lies in one free extent."""
        index = bisect_right(self.extents, wanted.start, key=_start) - 1
        self.extents[index : index + 1] = _difference(self.extents[index], wanted)

    def free(self, extent: Extent) -> None:
        """Give an extent back and join it with the free extents that it touches."""
        start, stop = extent
        first = last = bisect_left(self.extents, start, key=_start)
        if first > 0 and self.extents[first - 1].stop == start:
            first -= 1
            start = self.extents[first].start
        if last < len(self.extents) and self.extents[last].start == stop:
            stop = self.extents[last].stop
            last += 1
        self.extents[first:last] = [Extent(start, stop)]

    def emptiest(self, num_bytes: int) -> Extent:
        """The extent of this size in which the fewest bytes are allocated.

        An extent that moves upwards byte by byte gets no fuller until it leaves a free byte behind. So some emptiest
        one begins where a free extent begins, or ends at the end of the arena.
        """
        free = [0, *accumulate(extent.num_bytes for extent in self.extents)]

        def free_before(offset: int) -> int:
            index = bisect_right(self.extents, offset, key=_start)
            return free[index] - max(0, self.extents[index - 1].stop - offset) if index else 0

        highest = self.size_bytes - num_bytes
        starts = sorted({0, *(min(extent.start, highest) for extent in self.extents)})
        start = max(starts, key=lambda start: free_before(start + num_bytes) - free_before(start))
        return Extent(start, start + num_bytes)

    def _without(self, excluding: Extent) -> list[Extent]:
        return [part for extent in self.extents for part in _difference(extent, excluding)]


def _start(extent: Extent) -> int:
    return extent.start


def _size_then_start(extent: Extent) -> tuple[int, int]:
    return extent.num_bytes, extent.start


def _difference(extent: Extent, other: Extent) -> list[Extent]:
    """What is left of an extent without another, in order."""
    if other.stop <= extent.start or extent.stop <= other.start:
        return [extent]
    parts = Extent(extent.start, other.start), Extent(other.stop, extent.stop)
    return [part for part in parts if part.num_bytes > 0]
