"""How fast a device gathers and scatters rows: against its copy engine and against a copy in its own memory.

    python benchmarks/staging_device.py > benchmarks/results/staging_device_NAME.json

Prints JSON. Needs a GPU and Triton (`pip install 'kvferry[kernels]'`). *kernel* is the copy alone, with its index on
the device already; *with index* sends that there first, as the mover does; *row by row* does so with an index that has
three numbers for every row instead of a few tiles. Limits: one copy of as many contiguous bytes, to or from pinned host
memory, or in the device's own. Everything takes turns, every result is compared with plain indexing, figures are
medians by the device's own clock. `index_bytes` is what travels, `index_ms` what the processor takes to prepare it.

`TRITON_INTERPRET=1 python benchmarks/staging_device.py --device cpu --mebibytes 1 --repeats 1` runs all of it without a
device, in Triton's interpreter: to see that it works, not how fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measuring import machine, say
from staging import places

from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import Tile, tile_of
from kvferry.staging.device.launches import Launch, launch_of
from kvferry.staging.device.patterns import tiles_of

ROW_BYTES = (256, 1 << 10, 4 << 10, 64 << 10)
ORDERS = ("1 of 2", "1 of 4", "blocks")
GOALS = {"gather to host": 0.97, "scatter from host": 0.95, "gather on the device": 0.85}
SEED = 11
# A device takes half a millisecond and more to clear it.
BLANKET_BYTES = 2 << 30

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A cache of four times `total_bytes` on the device, staging on both sides, and what keeps the device busy."""

    cache: torch.Tensor
    here: torch.Tensor
    host: torch.Tensor
    blanket: torch.Tensor
    total_bytes: int

    @classmethod
    def of(cls, device: str, total_bytes: int) -> Memory:
        torch.manual_seed(SEED)
        cache = torch.empty(4 * total_bytes, dtype=torch.uint8, device=device).random_()
        host = torch.zeros(total_bytes, dtype=torch.uint8)
        here = torch.zeros(total_bytes, dtype=torch.uint8, device=device)
        blanket = torch.zeros(BLANKET_BYTES if device != "cpu" else 0, dtype=torch.uint8, device=device)
        return cls(cache, here, host if device == "cpu" else host.pin_memory(), blanket, total_bytes)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one length, at every second or fourth place, or in blocks in any order."""

    row_bytes: int
    order: str
    way: str

    def ends(self, memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
        """What is read and what is written."""
        return {
            "gather to host": (memory.cache, memory.host),
            "scatter from host": (memory.host, memory.cache),
            "gather on the device": (memory.cache, memory.here),
        }[self.way]

    def where(self, memory: Memory) -> np.ndarray:
        return places(self.order, memory.total_bytes // self.row_bytes)

    def copies(self, memory: Memory) -> Copies:
        source, target = self.ends(memory)
        sparse = self.where(memory) * self.row_bytes
        dense = np.arange(len(sparse)) * self.row_bytes
        offsets = [sparse if end is memory.cache else dense for end in (source, target)]
        columns = [
            (offset + end.data_ptr()).astype(np.uint64) for offset, end in zip(offsets, (source, target), strict=True)
        ]
        return Copies(*columns, np.full(len(sparse), self.row_bytes, np.uint64), len(sparse))


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What a device is told of rows: tiles, each with its columns."""

    launches: tuple[Launch, ...]
    columns: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> Index:
        launches = tuple(launch_of(tile) for tile in tiles)
        return cls(launches, tuple(torch.from_numpy(tile.columns()) for tile in tiles))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.columns)

    def on(self, device: torch.device) -> Index:
        return Index(self.launches, tuple(part.to(device, non_blocking=True) for part in self.columns))

    def pinned(self, device: torch.device) -> Index:
        is_here = device.type == "cpu"
        return Index(self.launches, tuple(part if is_here else part.pin_memory() for part in self.columns))

    def copy(self) -> None:
        from kvferry.staging.device.kernels import copy_tile

        for part, launch in zip(self.columns, self.launches, strict=True):
            copy_tile(part, launch)


def indices(case: Case, memory: Memory) -> dict[str, Callable[[], Index]]:
    """Both ways to tell a device which rows."""
    copies = case.copies(memory)
    return {"tiles": lambda: Index.of(tiles_of(copies)), "row by row": lambda: Index.of([tile_of(copies)])}


def work(case: Case, memory: Memory) -> dict[str, Step]:
    """The kernel, and what limits it."""
    device = memory.cache.device
    tiles, rows = (make().pinned(device) for make in indices(case, memory).values())
    there = tiles.on(device)
    source, target = case.ends(memory)
    total = memory.total_bytes
    return {
        "limit": lambda: target[:total].copy_(source[:total], non_blocking=True),
        "kernel": there.copy,
        "with index": lambda: tiles.on(device).copy(),
        "row by row": lambda: rows.on(device).copy(),
    }


def preparing(case: Case, memory: Memory, repeats: int) -> dict[str, dict[str, float]]:
    """Bytes of either index, and the median time that the processor takes to make it."""
    found = {}
    for name, make in indices(case, memory).items():
        times = [timed_here(make, memory) for _ in range(repeats)]
        found[name] = {"index_bytes": make().num_bytes, "index_ms": round(statistics.median(times), 4)}
    return found


def check(case: Case, memory: Memory, step: Step) -> None:
    """Every row is where it belongs. The device draws and compares: in the host that takes seconds for a GiB."""
    source, target = case.ends(memory)
    where = torch.from_numpy(case.where(memory)).to(memory.cache.device)
    staging = source if target is memory.cache else target
    staging.copy_(memory.here.random_())
    step()
    wait(memory)
    in_cache = memory.cache.view(-1, case.row_bytes)[where]
    if not torch.equal(in_cache, staging.to(memory.cache.device).view(-1, case.row_bytes)):
        raise RuntimeError(f"{case}: other bytes")


def wait(memory: Memory) -> None:
    if memory.cache.device.type != "cpu":
        torch.get_device_module(memory.cache.device).synchronize()


def milliseconds(steps: Mapping[str, Step], memory: Memory, repeats: int) -> dict[str, float]:
    """Medians; every repeat runs everything once."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    timed = timed_on_device if memory.cache.device.type != "cpu" else timed_here
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(timed(step, memory))
    return {name: statistics.median(values) for name, values in times.items()}


def timed_here(step: Step, memory: Memory) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1000


def timed_on_device(step: Step, memory: Memory) -> float:
    """The device is busy while it is told what to do: how long that takes is no part of the copy. And nothing of the
    last copy is left in its cache."""
    module: Any = torch.get_device_module(memory.cache.device)
    began, ended = module.Event(enable_timing=True), module.Event(enable_timing=True)
    memory.blanket.zero_()
    began.record()
    step()
    ended.record()
    wait(memory)
    return float(began.elapsed_time(ended))


def cases(all_row_bytes: Sequence[int]) -> Iterator[Case]:
    for row_bytes in all_row_bytes:
        for order in ORDERS:
            for way in GOALS:
                yield Case(row_bytes, order, way)


def measure(case: Case, memory: Memory, repeats: int) -> dict[str, object]:
    steps = work(case, memory)
    for name in ("kernel", "with index", "row by row"):
        check(case, memory, steps[name])
    ms = milliseconds(steps, memory, repeats)
    share = {name: round(ms["limit"] / ms[name], 3) for name in steps if name != "limit"}
    say(f"{case.row_bytes:6} {case.order:7} {case.way:20} {share} (goal {GOALS[case.way]})")
    rate = round(memory.total_bytes / ms["limit"] / 1e6, 2)
    row = {"row_bytes": case.row_bytes, "order": case.order, "way": case.way, "limit_gigabytes_per_s": rate}
    ms = {name: round(value, 4) for name, value in ms.items()}
    return {**row, "ms": ms, "share_of_limit": share, "index": preparing(case, memory, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too), xpu; cpu with Triton's interpreter")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=ROW_BYTES)
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed; hint: pip install 'kvferry[kernels]'")
    if arguments.device != "cpu" and not torch.get_device_module(arguments.device).is_available():
        parser.error(f"no {arguments.device} device here; see --help for a run without one")
    name = "cpu" if arguments.device == "cpu" else torch.get_device_module(arguments.device).get_device_name()
    memory = Memory.of(arguments.device, arguments.mebibytes << 20)
    found = [measure(case, memory, arguments.repeats) for case in cases(arguments.row_bytes)]
    head = {"device": name, "machine": machine(), "torch": torch.__version__, "goals": GOALS}
    sizes = {"total_bytes": memory.total_bytes, "repeats": arguments.repeats}
    print(json.dumps({**head, **sizes, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
