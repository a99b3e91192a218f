"""A small read from a peer that shows whether a transport really works, and how fast.

Every engine registers a little probe memory filled with a known pattern and tells its peers where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import FerryError
from kvferry.plan.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket, Transport
from kvferry.transport.patience import Patience
from kvferry.transport.pieces import View
from kvferry.transport.select import Measurement

__all__ = ["PROBE_BYTES", "Measurement", "Probe", "SelfTest", "fill_probe", "measure"]

PROBE_BYTES = 4 << 20
MAX_PROBE_BYTES = 64 << 20
LATENCY_BYTES = 4096
ROW_BYTES = 4096
NUM_READS = 3
# For a transport that is tested alone.
DEADLINE_S = 1.5
# Until then polls follow each other at once; a peer that has not answered by then is not worth a busy processor.
NUM_EAGER_POLLS = 1000


@dataclass(frozen=True, slots=True)
class Probe:
    """A peer's probe memory: its address there, its size, and the seed of the pattern in it."""

    address: int
    size_bytes: int
    seed: int


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


class Kind(StrEnum):
    """What a read of the self-test is for."""

    LATENCY = "latency"
    WHOLE = "whole"
    ROWS = "rows"


class Step(NamedTuple):
    """One read of the self-test."""

    kind: Kind
    copies: Copies


class SelfTest:
    """One peer's test, driven by whoever polls the transport: pass completions to `advance` until it is over.

    The scratch memory it reads into stays registered until its last ticket has ended (`is_settled`), even when the
    result, being a failure, is known earlier: late bytes must not land in memory that is used again.
    """

    def __init__(self, transport: Transport, peer: str, probe: Probe, deadline_s: float = DEADLINE_S) -> None:
        """A test that is not over after `deadline_s`, in which it had turns, has failed."""
        self._deadline_s = deadline_s
        self._transport = transport
        self._peer = peer
        self._probe = probe
        self._scratch: View = np.empty(0, np.uint8)
        self._memory: Memory | None = None
        self._ticket: Ticket | None = None
        self._patience = Patience(deadline_s, 0.0)
        self._posted_at = 0.0
        self._latency_s = float("inf")
        self._steps: list[Step] = []
        self._best_s = {Kind.WHOLE: float("inf"), Kind.ROWS: float("inf")}
        self.result: Measurement | None = None

    def start(self, now: float) -> None:
        """Post the first read; `now` is in seconds of any clock. Failures are in `result`."""
        self._patience = Patience(self._deadline_s, now)
        if not 2 * ROW_BYTES <= self._probe.size_bytes <= MAX_PROBE_BYTES:
            self._end(f"a probe of {self._probe.size_bytes} bytes")
            return
        self._scratch = np.zeros(self._probe.size_bytes, np.uint8)
        memory = Memory(int(self._scratch.ctypes.data), self._scratch.size, -1)
        try:
            self._transport.register(memory)
            self._memory = memory
            self._steps = _steps(self._probe, memory.address)
            self._post(now)
        except FerryError as error:
            self._end(str(error))

    @property
    def is_settled(self) -> bool:
        """Whether there is a result and nothing of the test is left open."""
        return self.result is not None and self._ticket is None

    def advance(self, completions: Iterable[Completion], now: float) -> None:
        """Take note of ended tickets (others' are ignored) and of the time."""
        for completion in completions:
            if completion.ticket == self._ticket:
                self._ticket = None
                self._take(completion, now)
        self._patience.spend(now)
        if self.result is None and self._patience.is_over:
            self._end(f"no answer within {self._deadline_s:.2g} s")

    def _take(self, completion: Completion, now: float) -> None:
        if self.result is not None:
            self._release()
        elif completion.error:
            self._end(completion.error)
        else:
            self._evaluate(now)

    def _evaluate(self, now: float) -> None:
        """Note the time of a read; compare the bytes of the last read of each kind, whose turn it is to be seen."""
        elapsed = max(now - self._posted_at, 1e-9)
        done = self._steps.pop(0)
        if done.kind is Kind.LATENCY:
            self._latency_s = elapsed
        else:
            self._best_s[done.kind] = min(self._best_s[done.kind], elapsed)
        is_last = not self._steps or self._steps[0].kind is not done.kind
        if is_last and (num_wrong := self._num_wrong(done.copies)):
            self._end(f"{num_wrong} of {done.copies.num_bytes} bytes are wrong")
            return
        if not self._steps:
            self._end("")
            return
        try:
            self._post(now)
        except FerryError as error:
            self._end(str(error))

    def _num_wrong(self, copies: Copies) -> int:
        wrong = _pattern(self._probe.size_bytes, self._probe.seed) != self._scratch
        starts = (copies.target - np.uint64(self._scratch.ctypes.data)).tolist()
        ends = zip(starts, copies.length.tolist(), strict=True)
        return sum(int(np.count_nonzero(wrong[start : start + length])) for start, length in ends)

    def _post(self, now: float) -> None:
        # Cleared, so that a read that brings nothing does not pass for the one before it.
        self._scratch[:] = 0
        self._posted_at = now
        self._ticket = self._transport.post(self._peer, self._steps[0].copies, Direction.READ)

    def _end(self, error: str) -> None:
        rates = dict.fromkeys(self._best_s, 0.0)
        if not error:
            sizes = {Kind.WHOLE: self._scratch.size, Kind.ROWS: _num_row_bytes(self._scratch.size)}
            rates = {kind: sizes[kind] / best_s / 1e9 for kind, best_s in self._best_s.items()}
        self.result = Measurement(self._transport.name, rates[Kind.WHOLE], rates[Kind.ROWS], self._latency_s, error)
        if self._ticket is None:
            self._release()
        else:
            self._transport.cancel(self._ticket)

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._transport.unregister(memory)


@lru_cache(maxsize=1)
def _pattern(size_bytes: int, seed: int) -> View:
    """What a probe must hold: the same for all transports to a peer, which are tested one after the other."""
    expected = np.empty(size_bytes, np.uint8)
    fill_probe(expected, seed)
    return expected


def _num_row_bytes(size_bytes: int) -> int:
    return size_bytes // (2 * ROW_BYTES) * ROW_BYTES


def _steps(probe: Probe, scratch_address: int) -> list[Step]:
    """One small read, then the whole probe in one row, then every other page of it in rows of their own."""
    starts = np.arange(_num_row_bytes(probe.size_bytes) // ROW_BYTES, dtype=np.uint64) * np.uint64(2 * ROW_BYTES)
    rows = _copies(probe, scratch_address, starts, ROW_BYTES)
    whole = _copies(probe, scratch_address, starts[:1], probe.size_bytes)
    small = _copies(probe, scratch_address, starts[:1], LATENCY_BYTES)
    return [Step(Kind.LATENCY, small), *[Step(Kind.WHOLE, whole)] * NUM_READS, *[Step(Kind.ROWS, rows)] * NUM_READS]


def _copies(probe: Probe, scratch_address: int, starts: NDArray[np.uint64], length: int) -> Copies:
    return Copies(
        source=starts + np.uint64(probe.address),
        target=starts + np.uint64(scratch_address),
        length=np.full(len(starts), length, np.uint64),
        pieces=len(starts),
    )


# Tests that ended without their ticket: their scratch memory may still be written to, so it is never given back.
_unsettled: list[SelfTest] = []


def measure(
    transport: Transport, peer: str, probe: Probe, clock: Callable[[], float] = time.perf_counter
) -> Measurement:
    """Run one test now, in at most about a second; never raises because of the peer.

    Polls the transport, so nothing else may be in flight on it; use `SelfTest` where something may. After a failure
    the transport may later report a ticket that the caller does not know.
    """
    test = SelfTest(transport, peer, probe)
    test.start(clock())
    num_polls = 0
    while test.result is None:
        num_polls += 1
        time.sleep(0 if num_polls < NUM_EAGER_POLLS else 0.0005)
        completions = transport.poll()
        test.advance(completions, clock())
    if not test.is_settled:
        _unsettled.append(test)
    return test.result
