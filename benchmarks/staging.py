"""How fast rows are gathered, scattered and copied in memory: against memcpy, numpy and torch.

    python benchmarks/staging.py > benchmarks/results/staging.json

Prints JSON. Between blocks of a cache and a contiguous staging buffer (gather, scatter), and from blocks to blocks in
one pass, which is what `shm` does; `posted` is the same with all that shm does around it, and `tiles` what a mover does
for a slot that was planned as the rows of a block and where the blocks begin. `reading` is a plain loop
that only loads each line of the rows and writes nothing: what rows with gaps cost a processor without any copying.
Every repeat measures everything once, so that what else the machine does hits all alike; figures are medians. All of
them use one thread, and what is measured is the processor time of that thread: none of them waits for anything but
memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from measuring import Work, machine, say
from numba import njit
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import Tile
from kvferry.transport.base import Direction
from kvferry.transport.posting import Posting
from kvferry.transport.registered_memory import LocatedRows, Offsets, Regions, View
from kvferry.transport.rowcopy import copier, with_numpy
from kvferry.transport.rowcopy.copy_queue import CopyQueue
from kvferry.transport.rowcopy.gather_scatter import copy_tiles

ROW_BYTES = (64, 256, 1 << 10, 4 << 10, 64 << 10)
BLOCK_ROWS = 16
LINE_BYTES = 64
SEED = 11

Copy = Callable[[LocatedRows, LocatedRows, Offsets], object]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Two caches of four times `total_bytes`, and staging: pages like those that engines share."""

    source: View
    target: View
    staging: View
    total_bytes: int

    @classmethod
    def of(cls, total_bytes: int) -> Memory:
        return cls(*(_touched(times * total_bytes) for times in (4, 4, 1)), total_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Rows of one length: `order` says which places of how many are taken, and in which order."""

    row_bytes: int
    order: str
    way: str

    def rows(self, memory: Memory) -> tuple[LocatedRows, LocatedRows, Offsets]:
        """Source, target and lengths."""
        num_rows = memory.total_bytes // self.row_bytes
        sparse = places(self.order, num_rows) * self.row_bytes
        dense = np.arange(num_rows) * self.row_bytes
        source = _side(memory.staging, dense) if self.way == "scatter" else _side(memory.source, sparse)
        target = _side(memory.staging, dense) if self.way == "gather" else _side(memory.target, sparse)
        if self.way == "direct" and self.order == "blocks":
            target = _side(memory.target, places("1 of 2", num_rows) * self.row_bytes)
        return source, target, np.full(num_rows, self.row_bytes)


def _touched(num_bytes: int) -> View:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, num_bytes)
    view = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    os.close(fd)
    view[:] = np.resize(np.random.default_rng(SEED).integers(0, 256, 1 << 20, dtype=np.uint8), num_bytes)
    return view


def _side(view: View, offset: Offsets) -> LocatedRows:
    return LocatedRows((view,), np.zeros(len(offset), np.int64), offset)


def places(order: str, num_rows: int) -> Offsets:
    """Every second or fourth head, token by token; or every second in blocks of 16 tokens that lie in any order."""
    if order == "blocks":
        blocks = np.random.default_rng(SEED).permutation(num_rows // BLOCK_ROWS)
        return (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel() * 2
    return np.arange(num_rows) * int(order.split()[-1])


def cases(lengths: Sequence[int]) -> Iterator[Case]:
    for row_bytes in lengths:
        for order in ("1 of 2", "1 of 4", "blocks"):
            for way in ("gather", "scatter", "direct"):
                yield Case(row_bytes, order, way)


def contestants() -> dict[str, Copy]:
    """What copies: ours with numba and without, and torch where it is installed."""
    copier.compile_in_background()
    copier.wait_until_compiled(120)
    ours = copier.current()
    found: dict[str, Copy] = {ours.name: lambda *rows: sum(ours.copy(*rows))}
    found["numpy"] = lambda *rows: sum(with_numpy.copy(*rows))
    try:
        import torch
    except ImportError:
        say("torch is not installed: left out")
        return found
    torch.set_num_threads(1)
    return found | {"torch": _copy_with_torch}


def _copy_with_torch(source: LocatedRows, target: LocatedRows, length: Offsets) -> None:
    """`index_select` and `index_copy_` on rows of one length that begin at multiples of it."""
    import torch

    row_bytes = int(length[0])
    there, here = (torch.from_numpy(side.views[0]).view(-1, row_bytes) for side in (source, target))
    picked, put = (torch.from_numpy(side.offset // row_bytes) for side in (source, target))
    if target.views[0].size == len(length) * row_bytes:
        torch.index_select(there, 0, picked, out=here)
    elif source.views[0].size == len(length) * row_bytes:
        here.index_copy_(0, put, there)
    else:
        here.index_copy_(0, put, torch.index_select(there, 0, picked))


def posted(source: LocatedRows, target: LocatedRows, length: Offsets) -> Work:
    """What the shm transport does from a post to its completion, the checks of every row included."""
    there, here = (Regions.of([(_address(side.views[0]), side.views[0].size)], side.views) for side in (source, target))
    columns = ((side.offset + _address(side.views[0])).astype(np.uint64) for side in (source, target))
    copies = Copies(*columns, length.astype(np.uint64), len(length))

    def work() -> None:
        queue = CopyQueue()
        queue.add(Posting("peer", here, there, copies, Direction.READ))
        while not queue.run():
            pass

    return work


def tiles(source: LocatedRows, target: LocatedRows, length: Offsets) -> Work:
    """What a mover does with a planned slot, checks included: its rows repeat from block to block."""
    sides = source, target
    pieces = Regions.of([(_address(side.views[0]), side.views[0].size) for side in sides], [s.views[0] for s in sides])
    starts = [(side.offset[::BLOCK_ROWS] + _address(side.views[0])).astype(np.uint64) for side in sides]
    shifts = [(side.offset[:BLOCK_ROWS] - side.offset[0]).astype(np.uint64) for side in sides]
    tile = Tile(*starts, *shifts, length[:BLOCK_ROWS].astype(np.uint64))

    def work() -> None:
        for _ in copy_tiles(pieces, [tile]):
            pass

    return work


def reading(source: LocatedRows, length: Offsets) -> Work:
    """Load every cache line of the rows, and do nothing with it. All rows have one length, a multiple of a line's."""
    words, row_words = source.views[0].view(np.uint64), int(length[0]) // 8
    first = source.offset // 8

    def work() -> None:
        _load(words, first, row_words)

    return work


@njit(nogil=True)
def _load(words: NDArray[np.uint64], first: Offsets, row_words: int) -> int:
    found = np.uint64(0)
    for start in first:
        for word in range(start, start + row_words, LINE_BYTES // 8):
            found ^= words[word]
    return found


def _address(view: View) -> int:
    return int(view.__array_interface__["data"][0])


def measure_case(case: Case, memory: Memory, copies: Mapping[str, Copy], repeats: int) -> dict[str, object]:
    """Milliseconds of each contestant and its share of memcpy's rate. Every copy is checked first."""
    rows = case.rows(memory)
    work: dict[str, Work] = {"memcpy": lambda: np.copyto(memory.staging, memory.source[: memory.total_bytes])}
    for name, copy in copies.items():
        work[name] = lambda copy=copy: copy(*rows)
    if case.way == "direct":
        work["posted"] = posted(*rows)
    else:
        work["tiles"] = tiles(*rows)
    for name, step in work.items():
        if name != "memcpy":
            check(step, rows)
    if case.way != "scatter":
        work["reading"] = reading(rows[0], rows[2])
    ms = processor_ms(work, repeats)
    ratios = {name: round(ms["memcpy"] / value, 2) for name, value in ms.items() if name != "memcpy"}
    say(f"{case.row_bytes:6} {case.order:7} {case.way:8} {ratios}")
    row = {"row_bytes": case.row_bytes, "order": case.order, "way": case.way}
    return {**row, "ms": {name: round(value, 2) for name, value in ms.items()}, "ratio_to_memcpy": ratios}


def processor_ms(work: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Median milliseconds of this thread, of work that takes turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, step in work.items():
            began = time.thread_time()
            step()
            times[name].append((time.thread_time() - began) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def check(copy: Work, rows: tuple[LocatedRows, LocatedRows, Offsets]) -> None:
    """A thousand rows, wherever they are, bring what is at their source."""
    source, target, length = rows
    row_bytes, some = int(length[0]), np.random.default_rng(SEED).integers(0, len(length), 1000)
    there, here = (side.views[0].reshape(-1, row_bytes) for side in (source, target))
    picked, put = (side.offset[some] // row_bytes for side in (source, target))
    here[put] = ~there[picked]
    copy()
    assert np.array_equal(there[picked], here[put]), "other bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=ROW_BYTES)
    arguments = parser.parse_args()
    copies, memory = contestants(), Memory.of(arguments.mebibytes << 20)
    results = [measure_case(case, memory, copies, arguments.repeats) for case in cases(arguments.row_bytes)]
    command = f"python benchmarks/{' '.join(['staging.py', *sys.argv[1:]])}"
    head = {"command": command, "machine": machine(), "total_bytes": memory.total_bytes, "repeats": arguments.repeats}
    print(json.dumps({**head, "load_average": os.getloadavg()[0], "cpu": results}, indent=1))


if __name__ == "__main__":
    main()
