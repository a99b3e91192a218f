"""Copies rows of bytes between views of memory: as machine code where numba is installed, with numpy elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column
from kvferry.plan.programs.tiles import Tile, rows_of
from kvferry.transport.registered_memory import LocatedRows, Offsets, Regions, View
from kvferry.transport.rowcopy.copier import current

_HERE_SOURCE, _HERE_TARGET = "this process (source)", "this process (target)"


def copy_rows(source: LocatedRows, target: LocatedRows, length: Offsets) -> Iterator[int]:
    """Copy every row when iterated; yields the bytes copied since the last step, a few MiB at most.

    `length` is an int64 column. Rows must lie inside their views and their targets must not overlap.
    """
    return current().copy(source, target, length)


def copy_tiles(regions: Regions, tiles: Sequence[Tile]) -> Iterator[None]:
    """Copy the rows of tiles between memories of this process when iterated; yields after every few MiB.

    Raises TransportError when a row leaves `regions`: nothing is copied then. Targets must not overlap.
    """
    copier = current()
    if copier.copy_tile is not None and regions.is_in_place:
        for tile in tiles:
            regions.check_tile(tile.source_start, tile.source_shift, tile.length, _HERE_SOURCE)
            regions.check_tile(tile.target_start, tile.target_shift, tile.length, _HERE_TARGET)
        for tile in tiles:
            yield from copier.copy_tile(tile)
    else:
        rows = rows_of(tiles)
        source = regions.located(rows.source, rows.length, _HERE_SOURCE)
        target = regions.located(rows.target, rows.length, _HERE_TARGET)
        for _ in copier.copy(source, target, rows.length.astype(np.int64)):
            yield


def gather(source: LocatedRows, length: Offsets, buffer: View) -> None:
    """Copy the rows one after another into the beginning of `buffer`. Raises TransportError when they do not fit."""
    for _ in copy_rows(source, _dense(buffer, length), length):
        pass


def scatter(buffer: View, target: LocatedRows, length: Offsets) -> None:
    """Copy the beginning of `buffer`, row after row, to where the rows lie.

    Raises TransportError when `buffer` holds fewer bytes.
    """
    for _ in copy_rows(_dense(buffer, length), target, length):
        pass


def stream_chunks(length: Offsets | Column, chunk_bytes: int) -> Iterator[slice]:
    """Cut rows into runs of about `chunk_bytes`: less than that plus one row."""
    start = np.cumsum(length) - length
    number = start // chunk_bytes
    cuts = np.flatnonzero(number[1:] != number[:-1]) + 1
    edges = [0, *cuts.tolist(), len(length)]
    for first, last in pairwise(edges):
        yield slice(first, last)


def _dense(buffer: View, length: Offsets) -> LocatedRows:
    end = np.cumsum(length)
    if len(end) and int(end[-1]) > buffer.size:
        raise TransportError(
            "rows do not fit the staging buffer", found=f"{end[-1]:,} bytes", expected=f"at most {buffer.size:,}"
        )
    return LocatedRows((buffer,), np.zeros(len(length), np.int64), end - length)
