"""Whether things that lie in memory at regular distances, such as states in blocks, lie upon one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

Step = tuple[int, int]
"""The distance in bytes from one to the next, and how many there are, at least two."""


class Extent(NamedTuple):
    """Items of `item_bytes` from byte `start` on. The first of `steps` is the outermost, and each is at least as long
    as all that lies inside it."""

    name: str
    start: int
    item_bytes: int
    steps: tuple[Step, ...]

    @property
    def stop(self) -> int:
        return self.start + self.item_bytes + sum((count - 1) * stride for stride, count in self.steps)

    @property
    def is_solid(self) -> bool:
        """Whether there are no gaps."""
        return self.stop - self.start == self.item_bytes * prod(count for _, count in self.steps)

    @property
    def first(self) -> Extent:
        """The first of the outermost step."""
        return self._replace(steps=self.steps[1:])


def overlapping(extents: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Two of which some bytes are the same; None where there are none, or where that cannot be told at a glance: where
    the first of each lie apart, and others amid one another."""
    for found in _clusters(extents):
        solid = [extent for extent in found if extent.is_solid]
        if two := next((two for two in pairwise(solid) if two[1].start < two[0].stop), None):
            return two
        has_steps = any(extent.steps for extent in found)
        if has_steps and (two := overlapping([extent.first for extent in found])):
            return two
    return None


def _clusters(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Those of two and more that hang together, if one looks at their ends alone, by where they start."""
    found: list[Extent] = []
    reached = 0
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.stop)):
        if found and extent.start >= reached:
            if len(found) > 1:
                yield found
            found = []
        found.append(extent)
        reached = max(reached, extent.stop)
    if len(found) > 1:
        yield found
