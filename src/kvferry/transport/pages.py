"""Has the kernel make the pages of a cache before the first request needs them.

vLLM's CPU cache is memory that nobody has touched: its pages are made one by one when bytes first land in them, which
takes longer than moving the bytes. Registering with a network card would make them all; copying between processes does
not.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvferry.transport.base import Memory

__all__ = ["Pages"]

logger = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
SLICE_BYTES: Final = 16 << 20
"""Made at a time: tens of milliseconds, after which `close` is heard."""
SPARE: Final = 0.1
"""Share of the free memory that must remain free."""
# From linux/mman.h. They change no byte: whoever writes at the same time writes as ever.
USE_HUGE_PAGES: Final = 14
MAKE_PAGES: Final = 23


class Pages:
    """Makes pages on a thread of its own, which ends when all are there, when memory gets short, or by `close`.

    Memory that is shared is left alone: its pages exist in its file. Where the kernel cannot (before Linux 5.14),
    nothing is lost but the time of the first requests.
    """

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._extents = [_whole(memory) for memory in memories if memory.shared_fd < 0]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pages", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop, at most one slice later. Safe to call twice. The memory may be given back afterwards."""
        self._closing.set()
        self._thread.join(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        free_bytes = _free_bytes()
        wanted_bytes = sum(size_bytes for _, size_bytes in self._extents)
        if wanted_bytes > free_bytes * (1 - SPARE):
            logger.info("the cache's pages are not made ahead: %d bytes wanted, %d free", wanted_bytes, free_bytes)
            return
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, size_bytes in self._extents:
            # A kernel without huge pages refuses this, and makes small ones.
            advise(start, size_bytes, USE_HUGE_PAGES)
            for first in range(0, size_bytes, SLICE_BYTES):
                length = min(SLICE_BYTES, size_bytes - first)
                if self._closing.is_set() or advise(start + first, length, MAKE_PAGES):
                    return


def _whole(memory: Memory) -> tuple[int, int]:
    """The part of a memory that begins and ends with a huge page: address and bytes, none when it is smaller."""
    first = -(-memory.address // HUGE_BYTES) * HUGE_BYTES
    last = (memory.address + memory.size_bytes) // HUGE_BYTES * HUGE_BYTES
    return first, max(0, last - first)


def _free_bytes() -> int:
    """What can be had without pushing anything out; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
