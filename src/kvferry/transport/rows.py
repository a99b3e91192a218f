"""Copies rows of bytes between views of memory: as machine code where numba is installed, with numpy elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.copies import Copies
from kvferry.transport.copier import current
from kvferry.transport.pieces import Offsets, Side, View

__all__ = ["copy_rows", "gather", "scatter", "split", "stream_chunks"]


def copy_rows(source: Side, target: Side, length: Offsets) -> Iterator[int]:
    """Copy every row when iterated; yields the bytes copied since the last step, a few MiB at most.

    `length` is an int64 column. Rows must lie inside their views and their targets must not overlap.
    """
    return current().copy(source, target, length)


def gather(source: Side, length: Offsets, buffer: View) -> None:
    """Copy the rows one after another into the beginning of `buffer`. Raises TransportError when they do not fit."""
    for _ in copy_rows(source, _dense(buffer, length), length):
        pass


def scatter(buffer: View, target: Side, length: Offsets) -> None:
    """Copy the beginning of `buffer`, row after row, to where the rows lie.

    Raises TransportError when `buffer` holds fewer bytes.
    """
    for _ in copy_rows(_dense(buffer, length), target, length):
        pass


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


def stream_chunks(length: Offsets, chunk_bytes: int) -> Iterator[slice]:
    """Cut rows into runs of about `chunk_bytes`: less than that plus one row."""
    start = np.cumsum(length) - length
    number = start // chunk_bytes
    cuts = np.flatnonzero(number[1:] != number[:-1]) + 1
    edges = [0, *cuts.tolist(), len(length)]
    for first, last in pairwise(edges):
        yield slice(first, last)


def _dense(buffer: View, length: Offsets) -> Side:
    end = np.cumsum(length)
    if len(end) and int(end[-1]) > buffer.size:
        raise TransportError(
            "rows do not fit the staging buffer", found=f"{end[-1]:,} bytes", expected=f"at most {buffer.size:,}"
        )
    return Side((buffer,), np.zeros(len(length), np.int64), end - length)
