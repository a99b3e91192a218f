"""The free bytes of an arena: holes in the order of their addresses, none touching another. Pure integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple


class Stretch(NamedTuple):
    """Bytes `start <= offset < stop` of an arena."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


NOWHERE = Stretch(0, 0)


class Room:
    """What is free of `size_bytes`. Beginning with everything; whoever takes a stretch gives the same one back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.holes: list[Stretch] = [Stretch(0, size_bytes)]

    @property
    def free_bytes(self) -> int:
        return sum(hole.num_bytes for hole in self.holes)

    def fit(self, num_bytes: int, apart_from: Stretch = NOWHERE) -> Stretch | None:
        """The beginning of the smallest hole that is large enough, the lowest of equals; None when there is none.

        Bytes of `apart_from` count as not free.
        """
        fitting = (part for part in self._parts(apart_from) if part.num_bytes >= num_bytes)
        best = min(fitting, key=_size_then_start, default=None)
        return None if best is None else Stretch(best.start, best.start + num_bytes)

    def largest_bytes(self, apart_from: Stretch = NOWHERE) -> int:
        """The most for which `fit` finds a place."""
        return max((part.num_bytes for part in self._parts(apart_from)), default=0)

    def take(self, wanted: Stretch) -> None:
        """Make a stretch, which lies in one hole, not free any more."""
        index = bisect_right(self.holes, wanted.start, key=_start) - 1
        self.holes[index : index + 1] = _without(self.holes[index], wanted)

    def give(self, back: Stretch) -> None:
        """Make a stretch free again and join it with the holes that it touches."""
        start, stop = back
        first = last = bisect_left(self.holes, start, key=_start)
        if first > 0 and self.holes[first - 1].stop == start:
            first -= 1
            start = self.holes[first].start
        if last < len(self.holes) and self.holes[last].start == stop:
            stop = self.holes[last].stop
            last += 1
        self.holes[first:last] = [Stretch(start, stop)]

    def emptiest(self, num_bytes: int) -> Stretch:
        """The stretch of this size in which the fewest bytes are taken.

        Moved upwards by a byte, a stretch gets no fuller until it leaves a byte of a hole behind. So some emptiest one
        begins where a hole begins, or is the highest there is.
        """
        free = [0, *accumulate(hole.num_bytes for hole in self.holes)]

        def free_before(offset: int) -> int:
            index = bisect_right(self.holes, offset, key=_start)
            return free[index] - max(0, self.holes[index - 1].stop - offset) if index else 0

        highest = self.size_bytes - num_bytes
        starts = sorted({0, *(min(hole.start, highest) for hole in self.holes)})
        start = max(starts, key=lambda start: free_before(start + num_bytes) - free_before(start))
        return Stretch(start, start + num_bytes)

    def _parts(self, apart_from: Stretch) -> list[Stretch]:
        """The holes without the bytes of `apart_from`."""
        return [part for hole in self.holes for part in _without(hole, apart_from)]


def _start(stretch: Stretch) -> int:
    return stretch.start


def _size_then_start(stretch: Stretch) -> tuple[int, int]:
    return stretch.num_bytes, stretch.start


def _without(hole: Stretch, other: Stretch) -> list[Stretch]:
    """What is left of a hole, in order."""
    if other.stop <= hole.start or hole.stop <= other.start:
        return [hole]
    parts = Stretch(hole.start, other.start), Stretch(other.stop, hole.stop)
    return [part for part in parts if part.num_bytes > 0]
