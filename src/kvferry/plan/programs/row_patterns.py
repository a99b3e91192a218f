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

from kvferry.plan.programs.copies import NOTHING, Column, Copies, split

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
        source = np.add.outer(self.source_start, self.source_shift).ravel()
        target = np.add.outer(self.target_start, self.target_shift).ravel()
        return Copies(source, target, np.tile(self.length, self.num_starts), pieces=len(self))

    def shifted(self, source: int, target: int) -> Tile:
        """The same rows elsewhere."""
        starts = self.source_start + np.uint64(source), self.target_start + np.uint64(target)
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
    """The rows of all tiles, tile after tile."""
    if not tiles:
        return NOTHING
    columns = zip(*((each.source, each.target, each.length) for each in (tile.copies() for tile in tiles)), strict=True)
    source, target, length = map(np.concatenate, columns)
    return Copies(source, target, length, pieces=len(length))
