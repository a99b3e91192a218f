"""The rows of a section put together where they lie side by side in the target's blocks, whatever block it is.

What is packed lies in the order of the target's addresses. Within a strip that order is known once for all blocks, so
that only the strips of a request have to be sorted, and not its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Column
from kvferry.plan.programs.program import Section
from kvferry.plan.strategy.strategies import RegionStarts, Side

# Of sections that are larger nothing is kept: a peer decides how large they are.
KEPT_ROWS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Strips:
    """Of one section, as one side sees it.

    Strip i begins at the target's address `start[i]` in block 0, slot 0, and ends `reach[i]` bytes behind it;
    `num_bytes` of them are rows. At this side its first run begins at `address[i]` in block 0, slot 0; run j begins
    `run_address[j]` behind that, is `run_skip[j]` bytes of rows into the strip, and has `run_length[j]` bytes.
    """

    start: Column
    reach: Column
    num_bytes: int
    address: Column
    run_address: Column
    run_skip: Column
    run_length: Column


def strips_of(section: Section, starts: RegionStarts, side: Side) -> Strips | None:
    """None where the runs of two strips differ, as in no format that engines have. Runs never cross the border of a
    region; `starts` are those of the layouts that the section was bound to."""
    find = _known if len(section) <= KEPT_ROWS else _found
    return find(section, starts, side)


def _found(section: Section, starts: RegionStarts, side: Side) -> Strips | None:
    order = np.argsort(section.target, kind="stable")
    target, length = section.target[order], np.uint64(section.length)
    address, borders = (target, starts.target) if side is Side.TARGET else (section.source[order], starts.source)
    # What is as far away as the next block may have rows of that one in between.
    first = _firsts(np.diff(target) < np.uint64(max(section.strides.target_block, section.length)))
    follows = (address[:-1] + length == address[1:]) & ~np.isin(address[1:], borders)
    follows[first[1:] - 1] = False
    run = _firsts(follows)
    if len(run) % len(first):
        return None
    shape = len(first), len(run) // len(first)
    begins, rows = address[run].reshape(shape), np.diff(run, append=len(target)).reshape(shape)
    runs = begins - begins[:, :1], run.reshape(shape) - first[:, np.newaxis], rows
    if any((column != column[0]).any() for column in runs):
        return None
    run_address, skip, num_rows = (column[0].astype(np.uint64) for column in runs)
    last = first + int(num_rows.sum()) - 1
    return Strips(
        start=target[first],
        reach=target[last] + length - target[first],
        num_bytes=int(num_rows.sum()) * section.length,
        address=address[first],
        run_address=run_address,
        run_skip=skip * length,
        run_length=num_rows * length,
    )


_known = lru_cache(maxsize=64)(_found)


def _firsts(follows: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The numbers of those that do not follow the one before."""
    return np.concatenate(([0], np.flatnonzero(~follows) + 1))
