"""Memory that peers may read and write to find out whether a transport works, and how fast.

Every engine registers a probe and tells its peers where it is. Its first part holds a pattern that follows from a
seed. Whoever writes there writes what is there anyway, so that any number of peers can test at the same time. What was
written can be told apart only in the marks behind it: pages that belong to nobody and of which each test draws one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvferry.transport.registered_memory import View

PROBE_BYTES = 4 << 20
MAX_PROBE_BYTES = 64 << 20
MARK_BYTES = 4096
NUM_MARKS = 64
MAX_MARKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Probe:
    """A peer's probe: its address there, the size and the seed of its pattern, and the number of marks behind it.

    Without marks it may only be read.
    """

    address: int
    size_bytes: int
    seed: int
    num_marks: int = 0

    @property
    def is_writable(self) -> bool:
        """Whether there are marks, and not so many that it makes no sense."""
        return 0 < self.num_marks <= MAX_MARKS

    def mark(self, number: int) -> int:
        """The address of a mark there."""
        return self.address + self.size_bytes + number * MARK_BYTES


def allocation_bytes(size_bytes: int = PROBE_BYTES, num_marks: int = NUM_MARKS) -> int:
    """What a probe takes in memory."""
    return size_bytes + num_marks * MARK_BYTES


def fill_probe(buffer: View, seed: int) -> None:
    """Fill with bytes that depend on `seed` and position: the same on every machine and with every numpy."""
    num_words = -(-buffer.size // 8)
    with np.errstate(over="ignore"):
        words = np.arange(num_words, dtype=np.uint64) + np.uint64(seed & 0xFFFF_FFFF)
        words *= np.uint64(0x9E37_79B9_7F4A_7C15)
        words ^= words >> np.uint64(31)
        words *= np.uint64(0xD6E8_FEB8_6659_FD93)
        words ^= words >> np.uint64(32)
    buffer[:] = words.astype("<u8", copy=False).view(np.uint8)[: buffer.size]


@lru_cache(maxsize=1)
def pattern(size_bytes: int, seed: int) -> View:
    """What a probe must hold: the same for all transports to a peer, which are tested one after the other."""
    expected = np.empty(size_bytes, np.uint8)
    fill_probe(expected, seed)
    return expected
