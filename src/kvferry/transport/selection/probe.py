"""Memory that peers may read and write to find out whether a transport works, and how fast.

Every engine registers a probe and tells its peers its address. Its first part holds a pattern that follows from a seed.
Peers write the same pattern there, so that any number of them can test at the same time. Only the marks behind it show
whether a write has arrived: each test picks one of these pages at random and writes random bytes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from kvferry.transport.registered_memory import View

PROBE_BYTES = 4 << 20
MAX_PROBE_BYTES = 64 << 20
MARK_BYTES = 4096
NUM_MARKS = 64
MAX_MARKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Probe:
    """The probe of a peer: its remote address, the size and the seed of its pattern, and the number of marks behind it.

    A probe without marks may only be read.
    """

    address: int
    size_bytes: int
    seed: int
    num_marks: int = 0

    @property
    def is_writable(self) -> bool:
        """Whether there are marks, and not an absurd number of them."""
        return 0 < self.num_marks <= MAX_MARKS

    def mark(self, number: int) -> int:
        """The remote address of a mark."""
        return self.address + self.size_bytes + number * MARK_BYTES


def allocation_bytes(size_bytes: int = PROBE_BYTES, num_marks: int = NUM_MARKS) -> int:
    """The memory that a probe takes."""
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


# By size and seed, as long as somebody has it.
_PATTERNS: WeakValueDictionary[tuple[int, int], View] = WeakValueDictionary()


def pattern(size_bytes: int, seed: int) -> View:
    """The pattern of a probe: one for all tests of a peer's transports, while any of them goes on."""
    expected = _PATTERNS.get((size_bytes, seed))
    if expected is None:
        expected = np.empty(size_bytes, np.uint8)
        fill_probe(expected, seed)
        _PATTERNS[size_bytes, seed] = expected
    return expected
