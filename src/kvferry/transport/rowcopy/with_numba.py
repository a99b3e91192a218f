"""Copies rows of bytes in a loop of machine code, without the interpreter's lock. Imports numba: import it late.

Lines of 64 bytes are written past the processor's cache. Ordinary writes would first read every line that they are
going to replace, and would push out of the cache what the engine works with. So this can be faster than memcpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvferry.errors import TransportError
from kvferry.plan.programs.tiles import Tile
from kvferry.transport.registered_memory import LocatedRows, Offsets

LINE_BYTES = 64
# One step copies this much and takes about a millisecond: the caller gets control back, and long rows are cut.
STEP_BYTES = 4 << 20
# What is gathered into a buffer no larger than this is read again while it is in the cache: write it there.
# Measured: gather and read take 0.6 of the time that way at 1 MiB, and the same from 4 MiB on.
IN_CACHE_BYTES = 2 << 20
# So many rows are checked and addressed at once: their columns stay in the cache.
PART_ROWS = 16 << 10

NO_PIECES = np.empty(0, np.int64)
_COLUMN = types.Array(types.int64, 1, "C")


# `_resolve`, `_advance` and `_advance_tile`, translated.
Resolve: TypeAlias = Callable[[Offsets, Offsets, Offsets, Offsets, Offsets, Offsets, Offsets], int]
Advance: TypeAlias = Callable[[Offsets, Offsets, Offsets, int, bool], int]
AdvanceTile: TypeAlias = Callable[[Offsets, Offsets, Offsets, Offsets, Offsets, int], int]


@dataclass(frozen=True, slots=True)
class NativeRows:
    """Rows copied by loops that `compile_rows` has made."""

    resolve: Resolve
    advance: Advance
    advance_tile: AdvanceTile

    def copy(self, source: LocatedRows, target: LocatedRows, length: Offsets) -> Iterator[int]:
        """Copy every row when iterated; yields the bytes copied since the last step, twice `STEP_BYTES` at most.

        `length` is an int64 column. Targets must not overlap. Raises TransportError when a row leaves its view.
        """
        sizes, starts, goals = _column(length), _Places.of(source), _Places.of(target)
        past_cache = sum(view.size for view in target.views) > IN_CACHE_BYTES
        for first in range(0, len(sizes), PART_ROWS):
            part = slice(first, first + PART_ROWS)
            rows = self._addresses(goals, part, sizes), self._addresses(starts, part, sizes), sizes[part]
            yield from self._copy_part(_cut(*rows) if int(rows[2].max()) > STEP_BYTES else rows, past_cache)

    def copy_tile(self, tile: Tile) -> Iterator[None]:
        """Copy the rows of a tile when iterated; yields after every few MiB. No address is checked."""
        short, row = tile.split(STEP_BYTES), 0
        starts = _column(short.source_start.view(np.int64)), _column(short.target_start.view(np.int64))
        shifts = _column(short.source_shift.view(np.int64)), _column(short.target_shift.view(np.int64))
        length = _column(short.length.view(np.int64))
        while row < len(short):
            row = self.advance_tile(*starts, *shifts, length, row)
            yield

    def _addresses(self, places: _Places, part: slice, sizes: Offsets) -> Offsets:
        region, offset, length = places.regions(part), _column(places.side.offset[part]), sizes[part]
        found = np.empty(len(length), np.int64)
        row = self.resolve(places.address, places.size_bytes, places.start, region, offset, length, found)
        if row >= 0:
            raise TransportError(
                f"row {part.start + row} leaves its memory, and was not refused: an internal error",
                found=f"{length[row]} bytes at {offset[row]} of view {places.side.view_index[part.start + row]}",
                expected=f"{len(places.address)} views of {places.size_bytes.min()} to {places.size_bytes.max()} bytes",
            )
        return found

    def _copy_part(self, rows: _Rows, past_cache: bool) -> Iterator[int]:
        row, length = 0, rows[2]
        while row < len(length):
            after = self.advance(*rows, row, past_cache)
            yield int(length[row:after].sum())
            row = after


# Addresses of targets and of sources, and lengths.
_Rows: TypeAlias = tuple[Offsets, Offsets, Offsets]


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """One side of a copy, and for each of its views the address, the size, and what offsets count from."""

    side: LocatedRows
    address: Offsets
    size_bytes: Offsets
    start: Offsets

    @classmethod
    def of(cls, side: LocatedRows) -> _Places:
        address, size_bytes = np.zeros(len(side.views), np.int64), np.zeros(len(side.views), np.int64)
        # Asking for an address takes a microsecond, and a few rows may lie in a few of hundreds of views. The others
        # keep the size 0, so that no row fits into them.
        for number in side.used_views:
            view = side.views[number]
            address[number], size_bytes[number] = view.__array_interface__["data"][0], view.size
        start = np.array(side.starts or [0] * len(side.views), np.int64)
        return cls(side, address, size_bytes, start)

    def regions(self, part: slice) -> Offsets:
        """The index of the view in which each row lies; empty where there is only one view."""
        return NO_PIECES if len(self.side.views) == 1 else _column(self.side.view_index[part])


def _column(values: Offsets) -> Offsets:
    """A column as the loops take it: one out of a frame, say, may be read-only and lie at an odd address."""
    return np.require(values, np.int64, ["C", "ALIGNED", "WRITEABLE"])


def _cut(goal: Offsets, start: Offsets, length: Offsets) -> _Rows:
    """The same bytes in rows of at most `STEP_BYTES`."""
    regions = np.maximum(-(-length // STEP_BYTES), 1)
    skip = (np.arange(int(regions.sum())) - np.repeat(np.cumsum(regions) - regions, regions)) * STEP_BYTES
    rest = np.repeat(length, regions) - skip
    return np.repeat(goal, regions) + skip, np.repeat(start, regions) + skip, np.minimum(rest, STEP_BYTES)


def compile_rows(on_disk: bool) -> NativeRows:
    """Translate the loops, or load the translation of an earlier start, and keep it `on_disk` for the next one.

    Takes a second or two the first time. Raises whatever numba and the file system raise.
    """
    number = types.int64
    resolve = njit(number(*[_COLUMN] * 7), nogil=True, cache=on_disk)(_resolve)
    advance = njit(number(_COLUMN, _COLUMN, _COLUMN, number, types.boolean), nogil=True, cache=on_disk)(_advance)
    advance_tile = njit(number(*[_COLUMN] * 5, number), nogil=True, cache=on_disk)(_advance_tile)
    return NativeRows(resolve, advance, advance_tile)


# From here on everything is translated by numba: no Python runs in it. Loops have few and plain arguments: with the
# columns in tuples they took a third longer.


@intrinsic
def _move(typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """A memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        byte, integer = ir.IntType(8).as_pointer(), ir.IntType(64)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, integer])
        places = [builder.inttoptr(value, byte) for value in values[:2]]
        builder.call(memcpy, [*places, values[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _write_line(typing: Any, target: Any, source: Any) -> Any:
    """Write a line of 64 bytes past the cache; `target` is a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()
        loaded = builder.load(builder.inttoptr(values[1], line), align=1)
        stored = builder.store(loaded, builder.inttoptr(values[0], line), align=LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _fence(typing: Any) -> Any:
    """Put the lines written past the cache so far before all later writes: nothing else orders them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(forceinline=True)
def _write_past_cache(target: int, source: int, num_bytes: int) -> None:
    head = min(-target & (LINE_BYTES - 1), num_bytes)
    last = num_bytes - (num_bytes - head) % LINE_BYTES
    if head:
        _move(target, source, head)
    for done in range(head, last, LINE_BYTES):
        _write_line(target + done, source + done)
    if last < num_bytes:
        _move(target + last, source + last, num_bytes - last)


@njit(forceinline=True)
def _write_lines(target: int, source: int, num_bytes: int) -> None:
    """Whole lines; four at a time, as the loop's own work takes as long as writing one."""
    last = num_bytes - num_bytes % (4 * LINE_BYTES)
    for done in range(0, last, 4 * LINE_BYTES):
        _write_line(target + done, source + done)
        _write_line(target + done + LINE_BYTES, source + done + LINE_BYTES)
        _write_line(target + done + 2 * LINE_BYTES, source + done + 2 * LINE_BYTES)
        _write_line(target + done + 3 * LINE_BYTES, source + done + 3 * LINE_BYTES)
    for done in range(last, num_bytes, LINE_BYTES):
        _write_line(target + done, source + done)


@njit(forceinline=True)
def _resolve_in_one(address: int, size: int, start: int, offset: Offsets, length: Offsets, found: Offsets) -> bool:
    """Do `_resolve` for rows of one view, several at a time as there is no branch. Returns whether all lie in it."""
    signs = 0
    for row in range(len(length)):
        skip, room = offset[row] - start, size - length[row]
        # Negative as soon as one of them is.
        signs |= skip | length[row] | room | (room - skip)
        found[row] = address + skip
    return signs >= 0


def _resolve(
    address: Offsets,
    size: Offsets,
    start: Offsets,
    region: Offsets,
    offset: Offsets,
    length: Offsets,
    found: Offsets,
) -> int:
    """Write the addresses where rows begin to `found`. Returns the first row outside its view, or -1.

    Row i begins `offset[i] - start[region[i]]` bytes behind `address[region[i]]`; no `region` stands for zeros.
    """
    in_many = len(region) > 0
    if not in_many and _resolve_in_one(address[0], size[0], start[0], offset, length, found):
        return -1
    for row in range(len(length)):
        number, num_bytes = region[row] if in_many else 0, length[row]
        if number < 0 or number >= len(size):
            return row
        skip = offset[row] - start[number]
        if skip < 0 or num_bytes < 0 or skip > size[number] - num_bytes:
            return row
        found[row] = address[number] + skip
    return -1


def _advance(target: Offsets, source: Offsets, length: Offsets, first: int, past_cache: bool) -> int:
    """Copy rows from number `first` on, a few MiB; returns the row to go on with. No address is checked any more."""
    left = STEP_BYTES
    for row in range(first, len(length)):
        # Each is read once: for all the compiler knows, what is written might be the columns.
        goal, start, num_bytes = target[row], source[row], length[row]
        if past_cache and not (goal | num_bytes) & (LINE_BYTES - 1):
            _write_lines(goal, start, num_bytes)
        elif past_cache:
            _write_past_cache(goal, start, num_bytes)
        else:
            _move(goal, start, num_bytes)
        left -= num_bytes
        if left <= 0:
            _fence()
            return row + 1
    _fence()
    return len(length)


def _advance_tile(
    source_start: Offsets,
    target_start: Offsets,
    source_shift: Offsets,
    target_shift: Offsets,
    length: Offsets,
    first: int,
) -> int:
    """Do `_advance` for a tile, whose rows are numbered start by start. Always past the cache."""
    left, width = STEP_BYTES, len(length)
    start, shift = first // width, first % width
    while start < len(source_start):
        source, target = source_start[start], target_start[start]
        while shift < width:
            goal, num_bytes = target + target_shift[shift], length[shift]
            if (goal | num_bytes) & (LINE_BYTES - 1):
                _write_past_cache(goal, source + source_shift[shift], num_bytes)
            else:
                _write_lines(goal, source + source_shift[shift], num_bytes)
            shift += 1
            left -= num_bytes
            if left <= 0:
                _fence()
                return start * width + shift
        start, shift = start + 1, 0
    _fence()
    return start * width
