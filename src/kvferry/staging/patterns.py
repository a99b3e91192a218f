"""Finds the sums in rows: the same places of blocks at every layer, in few tiles instead of one number after another.

Rows come from a plan in the order of their addresses at one side, and in that order their pattern repeats: whatever the
distances between p rows are, the next p rows have the same. Such a *period* makes a tile of any rows. It is guessed
from a few rows, and then every row is compared: a tile has exactly the rows that it was made from.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.copies import Copies
from kvferry.staging.tiles import MAX_ROW_BYTES, Tile, tile_of
from kvferry.transport.rows import split

__all__ = ["tiles_of"]

# Below these the index of plain rows takes less time than to look for a pattern of all of them, or of some.
MIN_ROWS = 64
MIN_ROWS_OF_PARTS = 2048
# Where rows begin and end in the middle of a pattern, what is left on both sides is looked at as often again.
MAX_DEPTH = 2
# Any period does for rows at equal distances, of which a short one would be found otherwise.
EVEN_PERIOD = 64
NUM_ASKED = 12

_Numbers = NDArray[np.int64]
_Number = TypeVar("_Number", int, _Numbers)


class _Stretch(NamedTuple):
    """Rows from `first` to `stop` that seem to have a period; as a tile they are `saved` numbers fewer."""

    first: int
    stop: int
    saved: int


def tiles_of(copies: Copies) -> tuple[Tile, ...]:
    """The same rows in a few tiles, in any order; those without a pattern in one. Rows that are very long are several
    rows of it, empty rows none.

    Costs a few looks at each row where all have one pattern, and some dozens where only some have, or none.
    """
    rows = split(copies, MAX_ROW_BYTES)
    patterned: list[Tile] = []
    rest = [part for part in _rest(rows, slice(0, len(rows)), MAX_DEPTH, patterned) if part.start < part.stop]
    if rest:
        patterned.append(tile_of(_parts(rows, rest)))
    return tuple(patterned)


def _rest(rows: Copies, part: slice, depth: int, patterned: list[Tile]) -> Iterator[slice]:
    """Add tiles for what has a pattern in some rows; the parts that have none."""
    inside = _parts(rows, [part])
    if len(inside) < MIN_ROWS:
        yield part
        return
    found = 0, len(inside)
    tile = _tile(inside)
    if tile is None and depth and len(inside) >= MIN_ROWS_OF_PARTS:
        found = _repeating(inside)
        tile = _tile(_parts(inside, [slice(*found)]))
    if tile is None:
        yield part
        return
    patterned.append(tile)
    first, stop = (part.start + edge for edge in found)
    for beside in (slice(part.start, first), slice(stop, part.stop)):
        yield from _rest(rows, beside, depth - 1, patterned)


def _parts(rows: Copies, parts: list[slice]) -> Copies:
    if parts == [slice(0, len(rows))]:
        return rows
    if len(parts) == 1:
        (part,) = parts
        return Copies(rows.source[part], rows.target[part], rows.length[part], rows.pieces)
    columns = rows.source, rows.target, rows.length
    source, target, length = (np.concatenate([column[part] for part in parts]) for column in columns)
    return Copies(source, target, length, rows.pieces)


# --- one period for all rows ---


def _tile(rows: Copies) -> Tile | None:
    """All rows as sums, with the period that takes the fewest numbers; None where that is not half of them."""
    num_rows = len(rows)
    for period in _divisors(num_rows):
        if 2 * _num_numbers(num_rows, period) <= 3 * num_rows and _seems(rows, period) and _has(rows, period):
            source, target = rows.source[:period], rows.target[:period]
            starts = rows.source[::period], rows.target[::period]
            return Tile(*starts, source - source[0], target - target[0], rows.length[:period])
    return None


def _num_numbers(num_rows: _Number, period: int) -> _Number:
    """What a tile has to say: two columns of starts, three of shifts."""
    return 2 * (num_rows // period) + 3 * period


def _divisors(num_rows: int) -> list[int]:
    """Those first that take the fewest numbers."""
    small = np.arange(1, isqrt(num_rows) + 1)
    small = small[num_rows % small == 0]
    found = sorted({*small.tolist(), *(num_rows // small).tolist()})
    return sorted(found, key=lambda period: _num_numbers(num_rows, period))


def _seems(rows: Copies, period: int) -> bool:
    """Whether a few rows are where the period would have them."""
    last = len(rows) // period - 1
    for outer, inner in ((1, period - 1), (last, period - 1), (last // 2, period // 2)):
        for column in (rows.source, rows.target):
            # As Python's integers: numpy's say something where they wrap around.
            origin, beside, below, there = (
                int(column[at]) for at in (0, inner, outer * period, outer * period + inner)
            )
            if origin + there != beside + below:
                return False
    return True


def _has(rows: Copies, period: int) -> bool:
    """Whether every row is where the period has it: as far from the row a period before as all others of its period."""
    if not np.array_equal(rows.length[period:], rows.length[:-period]):
        return False
    for column in (rows.source, rows.target):
        distance = column[period:] - column[:-period]
        same = distance[1:] == distance[:-1]
        same[period - 1 :: period] = True
        if not same.all():
            return False
    return True


# --- a period for some of the rows ---


def _repeating(rows: Copies) -> tuple[int, int]:
    """The first row of the stretch from which a pattern seems to save the most, and the one behind its last."""
    step = _steps(rows)
    best = max((_stretch(rows, step, period) for period in _periods(step)), key=lambda stretch: stretch.saved)
    return (best.first, best.stop) if best.saved > 0 else (0, 0)


def _steps(rows: Copies) -> _Numbers:
    """A number for how each row differs from the one before: hardly ever the same for two that do so in other ways."""
    step = rows.length * np.uint64(0x9E3779B97F4A7C15)
    step[1:] += (rows.source[1:] - rows.source[:-1]) * np.uint64(0xC2B2AE3D27D4EB4F)
    step[1:] += (rows.target[1:] - rows.target[:-1]) * np.uint64(0x165667B19E3779F9)
    return step.view(np.int64)


def _periods(step: _Numbers) -> set[int]:
    """At what distances steps follow themselves. Only steps are asked that differ from the one before: those are not
    at every place, and where blocks are in no order each is at one place of the pattern."""
    changes = np.flatnonzero(step[1:] != step[:-1]) + 1
    # With an odd distance, as what changes once mostly changes back at once.
    asked = np.unique(step[changes[:: len(changes) // NUM_ASKED | 1]])
    found = {EVEN_PERIOD}
    for number in asked.tolist():
        distances = np.bincount(np.diff(np.flatnonzero(step == number)), minlength=3)
        distances[:2] = 0
        if distances.any():
            found.add(int(distances.argmax()))
    return found


def _stretch(rows: Copies, step: _Numbers, period: int) -> _Stretch:
    """Where a period holds: there, rows differ from those a period before only where each period begins, as how far
    that is from the row before does not matter."""
    breaks = np.flatnonzero(step[period:] != step[:-period]) + period
    if 2 * len(breaks) >= len(step):
        return _Stretch(0, 0, 0)
    # Lengths must be equal there as well. The first row has no row before it.
    is_length = rows.length[breaks] != rows.length[breaks - period]
    breaks, is_length = (column[(breaks != period) | is_length] for column in (breaks, is_length))
    phase = np.where(is_length, -1 - breaks, breaks % period)
    # Breaks at which periods may begin, in runs: each stretch reaches from the break before its run to the one behind.
    head = np.flatnonzero(np.diff(phase, prepend=-len(step) - 1))
    before = np.concatenate(([period - 1], breaks))[np.where(phase[head] < 0, head + 1, head)]
    behind = np.concatenate((breaks[head], [len(step)]))
    first = np.concatenate(([0], before + 1 - period))
    first[1:] += np.where(phase[head] < 0, 0, (phase[head] - first[1:]) % period)
    num_rows = (behind - first) // period * period
    saved = np.where(num_rows < 2 * period, 0, 3 * num_rows - _num_numbers(num_rows, period))
    best = int(np.argmax(saved))
    return _Stretch(int(first[best]), int(first[best] + num_rows[best]), int(saved[best]))
