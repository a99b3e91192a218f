"""Medians of interleaved repeats, bytes allocated, and what the figures were measured on."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["Allocated", "Work", "allocated", "fresh_memory", "interleaved", "machine", "num_wake_ups", "say"]

Work = Callable[[], object]


class Allocated(NamedTuple):
    """Bytes that Python and numpy hold because of a piece of work: after it, and at most during it."""

    kept_bytes: int
    peak_bytes: int


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def fresh_memory() -> None:
    """From now on glibc takes every big array from the kernel and gives it back at once.

    Left alone, it keeps some of them, depending on their sizes and on what ran before: figures of the same work then
    differ by a factor of four with the order of the work. Does nothing where the C library is not glibc.
    """
    mmap_threshold, trim_threshold = -3, -1
    if platform.libc_ver()[0] == "glibc":
        for setting in (mmap_threshold, trim_threshold):
            ctypes.CDLL(None).mallopt(setting, 1 << 17)


def interleaved(work: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Median milliseconds of each; every repeat runs all once, so that what else the machine does hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for step in work.values():
        step()
    for _ in range(repeats):
        for name, step in work.items():
            began = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def allocated(work: Work) -> Allocated:
    """What tracemalloc counts while `work` runs, and while its result is still held."""
    tracemalloc.start()
    try:
        result = work()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return Allocated(kept, peak)


def num_wake_ups(process: int | str = "self") -> int:
    """How often threads of a process have gone to sleep and come back."""
    statuses = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/status")]
    return sum(int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for status in statuses)


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    software = f"Python {platform.python_version()}, numpy {np.__version__}"
    return f"{platform.machine()}, {processor()}, {cores} cores, {software}"


def processor() -> str:
    """What the system calls it: the share of memcpy that rows reach depends on it."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        named = {name.strip(): value.strip() for name, value in found.items()}
        if "model name" in named:
            return f"{named['model name']} (family {named.get('cpu family')}, model {named.get('model')})"
    return "unknown processor"
