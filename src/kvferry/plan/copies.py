"""The rows of one request: (source address, target address, length), three uint64 columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Copies", "concatenate", "merge"]

Column = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Rows to copy; each column has one uint64 per row, in bytes.

    Addresses are absolute in the address space of the rank that registered the region. `pieces` is the number of
    rows before neighbours were merged.
    """

    source: Column
    target: Column
    length: Column
    pieces: int

    def __len__(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())


def concatenate(parts: list[Copies]) -> Copies:
    """All rows of all parts, in order."""
    empty = np.empty(0, np.uint64)
    return Copies(
        source=np.concatenate([empty, *(part.source for part in parts)]),
        target=np.concatenate([empty, *(part.target for part in parts)]),
        length=np.concatenate([empty, *(part.length for part in parts)]),
        pieces=sum(part.pieces for part in parts),
    )


def merge(copies: Copies) -> Copies:
    """Join rows that follow one another without a gap on both sides: the same bytes in fewer rows."""
    if len(copies) < 2:
        return copies
    source, target, length = copies.source, copies.target, copies.length
    follows = (source[:-1] + length[:-1] == source[1:]) & (target[:-1] + length[:-1] == target[1:])
    if not follows.any():
        return copies
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return Copies(source[first], target[first], np.add.reduceat(length, first), copies.pieces)
