"""Rows as a device takes them: sums of starts and shifts, so that hardly any index has to travel there.

A request's rows are the same pattern (the starts: layers, keys and values, heads) at every place of a list (the shifts:
blocks). As three columns, rows of 256 bytes need 24 bytes of index each; as sums, next to nothing. Rows without a
pattern are one start, 0, and as many shifts as there are rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.copies import Column, Copies
from kvferry.transport.rows import split

__all__ = ["Launch", "Tile", "launch_of", "tile_of"]

VECTOR_BYTES = 16
"""The widest load or store of a device."""

# What one program of a kernel copies: some loads in flight for each of its 128 threads.
PROGRAM_BYTES = 8 << 10
# One long row among short ones must not make programs for all of them that have nothing to do.
MAX_ROW_BYTES = 8 * PROGRAM_BYTES

_ZERO: Column = np.zeros(1, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Row (i, j) has `length[j]` bytes, from `source_start[i] + source_shift[j]` to `target_start[i] +
    target_shift[j]`, i from 0 to `num_starts`, j from 0 to `num_shifts`; uint64 columns, in bytes, modulo 2**64."""

    source_start: Column
    target_start: Column
    source_shift: Column
    target_shift: Column
    length: Column

    @property
    def num_starts(self) -> int:
        return len(self.source_start)

    @property
    def num_shifts(self) -> int:
        return len(self.length)

    def __len__(self) -> int:
        return self.num_starts * self.num_shifts

    @property
    def num_bytes(self) -> int:
        return self.num_starts * int(self.length.sum())

    def copies(self) -> Copies:
        """The rows, one by one, those of each start together."""
        source = np.add.outer(self.source_start, self.source_shift).ravel()
        target = np.add.outer(self.target_start, self.target_shift).ravel()
        return Copies(source, target, np.tile(self.length, self.num_starts), pieces=len(self))

    def columns(self) -> NDArray[np.int64]:
        """All columns, one after another in the order of the fields. Devices have signed integers: the sum is equal."""
        fields = self.source_start, self.target_start, self.source_shift, self.target_shift, self.length
        return np.concatenate(fields).view(np.int64)


class Launch(NamedTuple):
    """How a kernel goes over a tile: by programs of `rows` rows and `columns` vectors, `num_pieces` for a whole row.

    `unit_bytes` is what every address and length is a multiple of, `row_bytes` the length of the longest row;
    `is_even` when all have it.
    """

    num_starts: int
    num_shifts: int
    num_pieces: int
    row_bytes: int
    is_even: bool
    unit_bytes: int
    rows: int
    columns: int

    @property
    def num_programs(self) -> int:
        return -(-self.num_starts * self.num_shifts // self.rows) * self.num_pieces


def tile_of(copies: Copies) -> Tile:
    """Rows without a pattern. Rows that are very long are several rows of it, empty rows none."""
    short = split(copies, MAX_ROW_BYTES)
    return Tile(_ZERO, _ZERO, short.source, short.target, short.length)


def launch_of(tile: Tile) -> Launch:
    """For a tile that has at least one row."""
    fields = tile.source_start, tile.target_start, tile.source_shift, tile.target_shift, tile.length
    bits = VECTOR_BYTES
    for field in fields:
        bits |= int(np.bitwise_or.reduce(field))
    unit_bytes = bits & -bits
    longest, shortest = int(tile.length.max()), int(tile.length.min())
    # At most eight bytes are one number; two of them make the widest vector.
    number_bytes = min(unit_bytes, 8)
    columns = min(1 << max(0, -(-longest // number_bytes) - 1).bit_length(), PROGRAM_BYTES // number_bytes)
    return Launch(
        num_starts=tile.num_starts,
        num_shifts=tile.num_shifts,
        num_pieces=max(1, -(-longest // (columns * number_bytes))),
        row_bytes=longest,
        is_even=longest == shortest,
        unit_bytes=unit_bytes,
        rows=PROGRAM_BYTES // number_bytes // columns,
        columns=columns,
    )
