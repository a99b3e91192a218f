"""The rows of one request: (source address, target address, length), three uint64 columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import choice_named

Column = NDArray[np.uint64]
"""One unsigned 64-bit integer per row, in bytes."""


class Direction(StrEnum):
    """Who moves the bytes, and so which side of a copy is remote: the target READs (pull), the source WRITEs (push)."""

    READ = "read"
    WRITE = "write"


NAMES = {"pull": Direction.READ, "push": Direction.WRITE, "auto": Direction.READ}


def direction_named(name: str) -> Direction:
    """What users call it; `auto` begins with reading (`may_switch_direction`).

    Raises ConfigurationError for a direction that does not exist.
    """
    return choice_named("transfer direction", name, NAMES)


def may_switch_direction(name: str) -> bool:
    """Whether a direction of this name is given up, or shared, where measurement says that this is faster."""
    return name == "auto"


def moved(addresses: Column, num_bytes: int) -> Column:
    """Addresses that are so many bytes further, modulo 2**64; less where that is negative."""
    return addresses + np.uint64(num_bytes % (1 << 64))


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

    def select(self, rows: slice | NDArray[np.int64]) -> Copies:
        """Some of the rows, or all in another order."""
        return Copies(self.source[rows], self.target[rows], self.length[rows], self.pieces)

    def shifted(self, source: int, target: int) -> Copies:
        """The same rows elsewhere, by so many bytes modulo 2**64."""
        return Copies(moved(self.source, source), moved(self.target, target), self.length, self.pieces)


NOTHING = Copies(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint64), pieces=0)
"""No rows."""


def run_starts(follows: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where runs begin: `follows[i]` says whether number i + 1 belongs to the run of number i."""
    return np.concatenate(([0], np.flatnonzero(~follows) + 1))


def firsts(copies: Copies, regions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that do not follow their predecessor without a gap on both sides, in the same region.

    `regions` has one number per row; rows with different numbers are never joined.
    """
    source, target, length = copies.source, copies.target, copies.length
    follows = (source[:-1] + length[:-1] == source[1:]) & (target[:-1] + length[:-1] == target[1:])
    return run_starts(follows & (np.diff(regions) == 0))


def merge(copies: Copies, regions: NDArray[np.int64]) -> Copies:
    """Join rows that follow one another (see `firsts`): the same bytes in fewer rows."""
    first = firsts(copies, regions)
    return Copies(copies.source[first], copies.target[first], np.add.reduceat(copies.length, first), copies.pieces)


def split(copies: Copies, max_row_bytes: int) -> Copies:
    """The same bytes in rows of 1 to `max_row_bytes` bytes, in order; rows of zero bytes vanish."""
    length = copies.length
    if not len(length) or (int(length.min()) > 0 and int(length.max()) <= max_row_bytes):
        return copies
    most = np.uint64(max_row_bytes)
    bits = ((length + most - np.uint64(1)) // most).astype(np.int64)
    first = np.repeat(np.cumsum(bits) - bits, bits)
    skip = (np.arange(int(bits.sum())) - first).astype(np.uint64) * most
    return Copies(
        source=np.repeat(copies.source, bits) + skip,
        target=np.repeat(copies.target, bits) + skip,
        length=np.minimum(np.repeat(length, bits) - skip, most),
        pieces=copies.pieces,
    )
