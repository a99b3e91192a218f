"""Rows as sums: what repeats in the blocks of a request, and where it repeats.

A request's rows are one pattern (of tokens, of heads) at very many places (blocks, layers, keys and values). As three
columns these are planned, checked and carried about row by row, which takes longer than to copy them where they are
short. As sums, next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Column, Copies, moved, split

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

    def copies(self) -> Copies:
        """The rows, one by one, those of each start together."""
        return rows_of((self,))

    def shifted(self, source: int, target: int) -> Tile:
        """The same rows elsewhere."""
        starts = moved(self.source_start, source), moved(self.target_start, target)
        return Tile(*starts, self.source_shift, self.target_shift, self.length)

    def split(self, max_row_bytes: int) -> Tile:
        """The same bytes in rows of 1 to `max_row_bytes` bytes; no rows at all if all are empty."""
        shifts = split(Copies(self.source_shift, self.target_shift, self.length, self.num_shifts), max_row_bytes)
        return Tile(self.source_start, self.target_start, shifts.source, shifts.target, shifts.length)

    def columns(self) -> NDArray[np.int64]:
        """All columns, one after another in the order of the fields. Devices have signed integers: the sum is equal."""
        fields = self.source_start, self.target_start, self.source_shift, self.target_shift, self.length
        return np.concatenate(fields).view(np.int64)


def tile_of(copies: Copies) -> Tile:
    """Rows as they are: one start, 0, and a shift for each."""
    return Tile(_ZERO, _ZERO, copies.source, copies.target, copies.length)


def plain(copies: Copies) -> tuple[Tile, ...]:
    """Rows as they are, if there are any."""
    return (tile_of(copies),) if len(copies) else ()


def rows_of(tiles: Sequence[Tile]) -> Copies:
    """The rows of all tiles, tile after tile, written once into their final columns."""
    total = sum(map(len, tiles))
    # One allocation: fresh pages from the system are most of the time here.
    source, target = np.empty((2, total), np.uint64)
    length = _lengths(tiles, total)
    start = 0
    for tile in tiles:
        part, shape = slice(start, start + len(tile)), (tile.num_starts, tile.num_shifts)
        np.add.outer(tile.source_start, tile.source_shift, out=source[part].reshape(shape))
        np.add.outer(tile.target_start, tile.target_shift, out=target[part].reshape(shape))
        if length.flags.writeable:
            length[part].reshape(shape)[:] = tile.length
        start = part.stop
    return Copies(source, target, length, pieces=total)


def _lengths(tiles: Sequence[Tile], total: int) -> Column:
    """The length column: one number seen `total` times where all rows are alike, else memory to be filled."""
    found = {int(length) for tile in tiles if len(tile) for length in (tile.length.min(), tile.length.max())}
    if len(found) == 1:
        return np.broadcast_to(np.uint64(found.pop()), total)
    return np.empty(total, np.uint64)
