"""Finds tiles in rows that are listed one by one, such as the same blocks at every layer.

A plan lists rows in the order of their addresses at one side, and in that order their distances repeat: the distances
between p rows are also those between the next p rows. A *period* p makes a tile of such rows. It is guessed from a few
rows, and then every row is compared: a tile has exactly the rows that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Copies, split
from kvferry.plan.programs.tiles import Tile, plain
from kvferry.staging.device.launches import MAX_ROW_BYTES

# Below this, plain rows take less of the processor's time and hardly longer to get to the device.
MIN_ROWS = 4096
# Each try looks at every row, on the agent's thread.
MAX_TRIES = 3


def for_device(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """The same rows for launches: none is very long, or empty, and lists of rows, or of starts, have their pattern
    found."""
    found: list[Tile] = []
    for tile in tiles:
        found += tiles_of(tile.copies()) if tile.num_starts == 1 else _folded(tile.split(MAX_ROW_BYTES))
    return tuple(tile for tile in found if len(tile))


def _folded(tile: Tile) -> list[Tile]:
    """The same rows with fewer starts, where these are sums themselves."""
    starts = Copies(tile.source_start, tile.target_start, np.ones(tile.num_starts, np.uint64), tile.num_starts)
    return [_with_starts(each, tile) for each in tiles_of(starts)]


def _with_starts(starts: Tile, tile: Tile) -> Tile:
    """The rows of a tile that begin at some of its starts."""
    if starts.num_starts == 1:
        listed = starts.copies()
        return Tile(listed.source, listed.target, tile.source_shift, tile.target_shift, tile.length)
    source = np.add.outer(starts.source_shift, tile.source_shift).ravel()
    target = np.add.outer(starts.target_shift, tile.target_shift).ravel()
    length = np.tile(tile.length, starts.num_shifts)
    return Tile(starts.source_start, starts.target_start, source, target, length)


def tiles_of(copies: Copies) -> tuple[Tile, ...]:
    """The same rows in at most two tiles, in any order: those that have a pattern, and the others one by one. Rows that
    are very long are several rows of a tile, empty rows none.

    Takes about as much of the processor's time as to prepare an index of plain rows, which is then saved.
    """
    rows = split(copies, MAX_ROW_BYTES)
    if not len(rows):
        return ()
    found = _pattern(rows) if len(rows) >= MIN_ROWS else _NO_PATTERN
    if not found.period:
        return plain(rows)
    tile = _sums(rows.select(slice(found.first, found.stop)), found.period)
    beside = np.concatenate((np.arange(found.first), np.arange(found.stop, len(rows))))
    return (tile, *plain(rows.select(beside)))


class _Pattern(NamedTuple):
    """The rows from `first` to `stop` have this period; it is 0 where it would not save half of the numbers."""

    first: int
    stop: int
    period: int


_NO_PATTERN = _Pattern(0, 0, 0)


def _pattern(rows: Copies) -> _Pattern:
    """The pattern of all rows, else of most of them, as in slots that begin and end in the middle of a period."""
    num_rows = len(rows)
    likely = (p for p in _divisors(num_rows) if _saves(num_rows, p) and _seems(rows, p))
    for period in islice(likely, MAX_TRIES):
        if _fits(rows, period):
            return _Pattern(0, num_rows, period)
    period = _distance(rows)
    return _stretch(rows, period) if period else _NO_PATTERN


def _sums(rows: Copies, period: int) -> Tile:
    source, target = rows.source[:period], rows.target[:period]
    starts = rows.source[::period], rows.target[::period]
    return Tile(*starts, source - source[0], target - target[0], rows.length[:period])


def _num_numbers(num_rows: int, period: int) -> int:
    """How many numbers describe a tile: two columns of starts, three of shifts."""
    return 2 * (num_rows // period) + 3 * period


def _saves(num_rows: int, period: int) -> bool:
    return 2 * _num_numbers(num_rows, period) < 3 * num_rows


# --- a period of all rows ---


def _divisors(num_rows: int) -> list[int]:
    """The divisors of `num_rows`, those first whose tiles need the fewest numbers."""
    small = np.arange(1, isqrt(num_rows) + 1)
    small = small[num_rows % small == 0]
    found = {*small.tolist(), *(num_rows // small).tolist()}
    return sorted(found, key=lambda period: _num_numbers(num_rows, period))


def _seems(rows: Copies, period: int) -> bool:
    """Whether a few rows are where the period would have them."""
    last = len(rows) // period - 1
    for outer, inner in ((1, period - 1), (last, period - 1), (last // 2, period // 2)):
        for column in (rows.source, rows.target):
            # As Python's integers: numpy's say something where they wrap around.
            origin, beside = int(column[0]), int(column[inner])
            below, there = int(column[outer * period]), int(column[outer * period + inner])
            if origin + there != beside + below:
                return False
    return True


def _fits(rows: Copies, period: int) -> bool:
    """Whether every row is where the period has it."""
    is_even, has_length = _compared(rows, period)
    is_even[period - 1 :: period] = True
    return bool(is_even.all() and has_length.all())


def _compared(rows: Copies, period: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each row from `period + 1` on is as far from the row a period before as the row just before it is from
    its own, and whether each row from `period` on is as long as the row a period before."""
    source, target = (column[period:] - column[:-period] for column in (rows.source, rows.target))
    is_even = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
    return is_even, rows.length[period:] == rows.length[:-period]


# --- a period of most rows ---


def _distance(rows: Copies) -> int:
    """A likely period: how many rows lie between the largest steps from row to row, or the smallest, since the longest
    way between two blocks is taken once per period. 0 where neither step is taken twice."""
    places = rows.source + rows.target
    steps = (places[1:] - places[:-1]).view(np.int64)
    found = [at for at in (np.flatnonzero(steps == extreme) for extreme in (steps.max(), steps.min())) if len(at) > 1]
    if not found:
        return 0
    distance = int(np.bincount(np.diff(min(found, key=len))).argmax())
    # With steps that are all alike, any number of them is a period.
    return distance if distance > 1 else isqrt(len(rows))


def _stretch(rows: Copies, period: int) -> _Pattern:
    """The longest stretch of rows that has the period. Only where a period begins may the step to a row differ from
    that a period before, since how far periods are apart does not matter."""
    is_even, has_length = _compared(rows, period)
    breaks, lengths = np.flatnonzero(~is_even) + period + 1, np.flatnonzero(~has_length) + period
    phase = int(np.bincount(breaks % period).argmax()) if len(breaks) else 0
    walls = np.sort(np.concatenate(([period - 1, len(rows)], breaks[breaks % period != phase], lengths)))
    first = walls[:-1] + 1 - period
    first += (phase - first) % period
    num_rows = (walls[1:] - first) // period * period
    best = int(np.argmax(num_rows))
    start, found = int(first[best]), int(num_rows[best])
    is_worth_it = 2 * found > len(rows) and _saves(found, period)
    return _Pattern(start, start + found, period) if is_worth_it else _NO_PATTERN
