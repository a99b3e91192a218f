"""How a kernel goes over a tile of rows.

Tiles are also what keeps the index short that has to travel to the device: rows of 256 bytes need 24 bytes each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.plan.programs.tiles import Tile

VECTOR_BYTES = 16
"""The widest load or store of a device."""

# What one program of a kernel copies: some loads in flight for each of its 128 threads.
PROGRAM_BYTES = 8 << 10
# One long row among short ones must not make programs for all of them that have nothing to do.
MAX_ROW_BYTES = 8 * PROGRAM_BYTES


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


def launch_of(tile: Tile) -> Launch:
    """Return the launch of a tile that has at least one row."""
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
