"""Copies rows of bytes as fast as numpy can: never one Python step per short row. What is used without numba."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.registered_memory import LocatedRows, Offsets, View

# From here on one memmove per row costs no more than its share of a vectorised step (measured: equal at 4 to 16 KiB).
LONG_ROW_BYTES = 16 << 10
# A vectorised step goes through a temporary of this size; it must stay in the L2 cache.
STEP_BYTES = 256 << 10
# A long row is copied in bits of this size, so that the caller gets control back in time.
BIT_BYTES = 4 << 20
# With more distinct short lengths than this, lengths are rounded to powers of two first.
MAX_NUM_LENGTHS = 24


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows between two views: int64 byte offsets and lengths."""

    source: Offsets
    target: Offsets
    length: Offsets

    def take(self, which: NDArray[np.intp]) -> _Rows:
        return _Rows(self.source[which], self.target[which], self.length[which])


def copy(source: LocatedRows, target: LocatedRows, length: Offsets) -> Iterator[int]:
    """Copy every row when iterated; yields the bytes copied since the last step, a few MiB at most.

    `length` is an int64 column. Rows must lie inside their views and their targets must not overlap.
    """
    rows = _Rows(source.view_offsets, target.view_offsets, length)
    pair = source.view_index * len(target.views) + target.view_index
    for members in _groups(pair.astype(np.uint16) if _fits_uint16(source, target) else pair):
        first = int(members[0])
        yield from _copy_between(
            source.views[int(source.view_index[first])],
            target.views[int(target.view_index[first])],
            rows if len(members) == len(length) else rows.take(members),
        )


def _fits_uint16(source: LocatedRows, target: LocatedRows) -> bool:
    return len(source.views) * len(target.views) <= 1 << 16


def _groups(keys: NDArray[np.integer]) -> Iterator[NDArray[np.intp]]:
    """The indices of each distinct key, in order. Fast for uint16 (radix sort) and for equal keys."""
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    yield from np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)


def _copy_between(source: View, target: View, rows: _Rows) -> Iterator[int]:
    short = np.minimum(rows.length, LONG_ROW_BYTES).astype(np.uint16)
    if np.count_nonzero(np.bincount(short)) > MAX_NUM_LENGTHS:
        is_long = rows.length >= LONG_ROW_BYTES
        yield from _copy_long(source, target, rows.take(np.flatnonzero(is_long)))
        rows = _power_windows(rows.take(np.flatnonzero(~is_long & (rows.length > 0))))
        short = rows.length.astype(np.uint16)
    for members in _groups(short):
        row_bytes = int(short[members[0]])
        group = rows if len(members) == len(short) else rows.take(members)
        if row_bytes >= LONG_ROW_BYTES:
            yield from _copy_long(source, target, group)
        elif row_bytes:
            yield from _copy_short(source, target, group)


def _power_windows(rows: _Rows) -> _Rows:
    """Cover each row by one or two windows of the largest power of two that fits into it.

    The two may overlap: those bytes are copied twice, with the same value. It bounds the number of distinct lengths.
    """
    width = np.int64(1) << (np.frexp(rows.length.astype(np.float64))[1].astype(np.int64) - 1)
    rest = rows.length - width
    tail = np.flatnonzero(rest)
    return _Rows(
        source=np.concatenate((rows.source, (rows.source + rest)[tail])),
        target=np.concatenate((rows.target, (rows.target + rest)[tail])),
        length=np.concatenate((width, width[tail])),
    )


def _copy_long(source: View, target: View, rows: _Rows) -> Iterator[int]:
    # Slices of memoryviews cost half of what slices of arrays cost.
    from_bytes, to_bytes = source.data, target.data
    columns = (rows.source.tolist(), rows.target.tolist(), rows.length.tolist())
    for start, goal, length in zip(*columns, strict=True):
        for done in range(0, length, BIT_BYTES):
            bit = min(BIT_BYTES, length - done)
            to_bytes[goal + done : goal + done + bit] = from_bytes[start + done : start + done + bit]
            yield bit


def _copy_short(source: View, target: View, rows: _Rows) -> Iterator[int]:
    """Rows of one length: index windows of that length that begin at every byte."""
    row_bytes = int(rows.length[0])
    from_windows, to_windows = _windows(source, row_bytes), _windows(target, row_bytes)
    step = STEP_BYTES // row_bytes
    for first in range(0, len(rows.length), step):
        part = slice(first, first + step)
        to_windows[rows.target[part]] = from_windows[rows.source[part]]
        yield row_bytes * len(rows.length[part])


def _windows(view: View, row_bytes: int) -> NDArray[np.void]:
    # Never np.take on these: it would copy all the overlapping windows first.
    return np.ndarray((view.size - row_bytes + 1,), np.dtype((np.void, row_bytes)), view, 0, (1,))
