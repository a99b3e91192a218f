"""Small copies from and to a peer that show whether a transport really works, and how fast, in both directions."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np

from kvferry.errors import FerryError
from kvferry.transport.base import Completion, Direction, Memory, Ticket, Transport
from kvferry.transport.registered_memory import View
from kvferry.transport.selection.awake_timeout import AwakeTimeout
from kvferry.transport.selection.measurement import UNMEASURED, Measurement, Rates
from kvferry.transport.selection.probe import (
    MARK_BYTES,
    MAX_PROBE_BYTES,
    PROBE_BYTES,
    Probe,
    fill_probe,
    pattern,
)
from kvferry.transport.selection.self_test_steps import (
    READS,
    ROW_BYTES,
    WRITES,
    ScratchBuffer,
    Step,
    StepKind,
    all_steps,
    mark_steps,
    num_row_bytes,
)

__all__ = ["PROBE_BYTES", "ROW_BYTES", "Measurement", "Probe", "SelfTest", "fill_probe", "measure"]

logger = logging.getLogger(__name__)

# For a transport that is tested alone.
DEADLINE_S = 1.5
# The first polls follow each other at once. After them a sleep between polls saves the processor.
NUM_EAGER_POLLS = 1000
# A copy that takes longer than this counts as hung: other self-tests do not wait for it any more.
HUNG_S = 0.05
# Another process may write the same mark at the same time, which says nothing about the transport.
MAX_MARKS_TRIED = 3


class SelfTest:
    """The self-test of one transport to one peer. The caller polls the transport and passes completions to `advance`.

    The scratch buffer stays registered until the last ticket has ended (`is_settled`), also when the test has failed
    earlier: late bytes must not land in memory that is used again. With `must_poll_now` the caller must not sleep
    before the next poll: the sleep would count as time of the copy.
    """

    def __init__(self, transport: Transport, peer: str, probe: Probe, deadline_s: float = DEADLINE_S) -> None:
        """A test fails after `deadline_s`, not counting gaps in which its thread did not run."""
        self._deadline_s = deadline_s
        self._transport = transport
        self._peer = peer
        self._probe = probe
        self._buffer: View = np.empty(0, np.uint8)
        # The contents of the peer's probe.
        self._expected: View = np.empty(0, np.uint8)
        self._scratch = ScratchBuffer(0, probe)
        self._memory: Memory | None = None
        self._ticket: Ticket | None = None
        self._timeout = AwakeTimeout(deadline_s, 0.0)
        self._posted_at = 0.0
        self._steps: list[Step] = []
        self._marks_left = MAX_MARKS_TRIED
        self._best_s: dict[StepKind, float] = {}
        self._writing_error = ""
        self._is_repeated = False
        self.must_poll_now = False
        self.result: Measurement | None = None

    def start(self, now: float) -> None:
        """Get ready for the first read; `now` is in seconds of any clock. Failures are in `result`."""
        self._timeout = AwakeTimeout(self._deadline_s, now)
        if not 2 * ROW_BYTES <= self._probe.size_bytes <= MAX_PROBE_BYTES:
            self._end(f"a probe of {self._probe.size_bytes} bytes")
            return
        try:
            self._buffer = np.zeros(ScratchBuffer(0, self._probe).size_bytes, np.uint8)
            self._expected = pattern(self._probe.size_bytes, self._probe.seed)
            self._scratch = ScratchBuffer(int(self._buffer.ctypes.data), self._probe)
            memory = Memory(self._scratch.address, self._buffer.size, -1)
            self._transport.register(memory)
            self._memory = memory
            if self._probe.is_writable:
                self._write_buffer[:] = self._expected
            self._steps = all_steps(self._scratch, [self._new_mark()] if self._probe.is_writable else [])
        except FerryError as error:
            self._end(str(error))
        except MemoryError:
            self._end(f"no memory for a probe of {self._probe.size_bytes} bytes")

    @property
    def _read_buffer(self) -> View:
        return self._buffer[: self._probe.size_bytes]

    @property
    def _write_buffer(self) -> View:
        return self._buffer[self._probe.size_bytes :][: self._probe.size_bytes]

    @property
    def _mark(self) -> View:
        return self._buffer[2 * self._probe.size_bytes :]

    @property
    def is_settled(self) -> bool:
        """Whether there is a result and no open ticket."""
        return self.result is not None and self._ticket is None

    def is_copying(self, now: float) -> bool:
        """Whether a copy is under way and has not hung: other work of this thread would count as its time."""
        return self._ticket is not None and not self.is_hung(now)

    def is_hung(self, now: float) -> bool:
        """Whether the copy that is under way takes longer than any should."""
        return self._ticket is not None and now - self._posted_at >= HUNG_S

    def advance(self, completions: Iterable[Completion], now: float, *, may_post: bool = True) -> None:
        """Process ended tickets (those of others are ignored) and the time; post the next copy if `may_post`."""
        self.must_poll_now = False
        if may_post and self.result is None and self._ticket is None:
            # Not in the call before: time was spent since its `now`, which does not belong to the next copy.
            self._post(now)
        for completion in completions:
            if completion.ticket == self._ticket:
                self._ticket = None
                self._complete(completion, now)
        self._timeout.advance(now)
        if self.result is None and self._timeout.is_expired:
            # A repeated measurement follows a test that has passed.
            self._end("" if self._is_repeated else f"no answer within {self._deadline_s:.2g} s")

    def abandon(self) -> None:
        """End the test: post nothing more, because another peer may get the name."""
        if self.result is None:
            self._end("the peer was disconnected")

    def _complete(self, completion: Completion, now: float) -> None:
        if self.result is not None:
            self._release()
        elif completion.error:
            self._fail(completion.error, now)
        else:
            self._evaluate(now)

    def _evaluate(self, now: float) -> None:
        """Record the time of a copy and compare the bytes that it has brought."""
        elapsed = max(now - self._posted_at, 1e-9)
        done = self._steps[0]
        self._best_s[done.kind] = min(self._best_s.get(done.kind, elapsed), elapsed)
        num_wrong = self._num_wrong(done)
        if num_wrong and done.kind is StepKind.MARK_BACK and self._marks_left:
            self._steps[:1] = mark_steps(self._scratch, self._new_mark())
        elif num_wrong:
            self._fail(f"{num_wrong} of {done.copies.num_bytes} bytes are wrong", now)
            return
        else:
            self._steps.pop(0)
        self._continue(now)

    def _fail(self, error: str, now: float) -> None:
        """A transport over which only writing fails can still be read over: the reads continue."""
        if not self._steps[0].is_for_writing:
            self._end(error)
            return
        self._writing_error = error
        self._steps = [step for step in self._steps if not step.is_for_writing]
        self._continue(now)

    def _continue(self, now: float) -> None:
        if not self._steps and self._needs_repetition:
            self._is_repeated = True
            self._steps = all_steps(self._scratch, [])
        if not self._steps:
            self._end("")
            return
        self.must_poll_now = True
        if self._steps[0].direction is Direction.READ:
            # One byte of each row is changed, so that a row that does not arrive is not taken for the one before it.
            self._read_buffer[::ROW_BYTES] = ~self._expected[::ROW_BYTES]

    @property
    def _needs_repetition(self) -> bool:
        """Whether one direction seems far slower. A busy machine can have caused that, so it is measured once more."""
        has_time = self._timeout.left_s > self._deadline_s / 2
        return has_time and not self._is_repeated and self._measured("").is_asymmetric

    def _new_mark(self) -> int:
        """Fill the mark with random bytes; returns the address of a randomly chosen mark at the peer."""
        self._marks_left -= 1
        self._mark[:] = np.frombuffer(secrets.token_bytes(MARK_BYTES), np.uint8)
        return self._probe.mark(secrets.randbelow(self._probe.num_marks))

    def _num_wrong(self, done: Step) -> int:
        """The number of wrong bytes. Written bytes are compared when they are read back."""
        if done.direction is Direction.WRITE:
            return 0
        if done.kind is StepKind.MARK_BACK:
            return int(np.count_nonzero(self._read_buffer[:MARK_BYTES] != self._mark))
        num_rows, num_bytes = len(done.copies), int(done.copies.length[0])
        found, wanted = self._read_buffer[:num_bytes], self._expected[:num_bytes]
        if num_rows > 1:
            # Every other page.
            found, wanted = (
                view[: 2 * num_rows * ROW_BYTES].reshape(num_rows, 2, ROW_BYTES)[:, 0]
                for view in (self._read_buffer, self._expected)
            )
        return int(np.count_nonzero(found != wanted))

    def _post(self, now: float) -> None:
        self.must_poll_now, self._posted_at = True, now
        try:
            self._ticket = self._transport.post(self._peer, self._steps[0].copies, self._steps[0].direction)
        except FerryError as error:
            self._fail(str(error), now)

    def _end(self, error: str) -> None:
        if error and self._steps and self._steps[0].is_for_writing and self._best_s.keys() >= set(READS):
            self._writing_error, error = error, ""
        self.result = self._measured(error)
        if self._ticket is None:
            self._release()
        else:
            self._transport.cancel(self._ticket)

    def _measured(self, error: str) -> Measurement:
        failed = Rates(0.0, 0.0, self._best_s.get(StepKind.LATENCY, float("inf")), error)
        read, written = failed if error else self._rates(*READS), UNMEASURED
        if self._writing_error:
            written = Rates(0.0, 0.0, float("inf"), self._writing_error)
        elif self._probe.is_writable and not error:
            written = self._rates(*WRITES)
        figures = (read.gigabytes_per_s, read.row_gigabytes_per_s, read.latency_s, read.error)
        transport = self._transport
        return Measurement(transport.name, *figures, written, transport.carriers(self._peer), transport.copies_once)

    def _rates(self, small: StepKind, whole: StepKind, rows: StepKind) -> Rates:
        size_bytes, small_s = self._probe.size_bytes, self._best_s[small]
        return Rates(
            gigabytes_per_s=size_bytes / _without_fixed_cost(small_s, self._best_s[whole]) / 1e9,
            row_gigabytes_per_s=num_row_bytes(size_bytes) / _without_fixed_cost(small_s, self._best_s[rows]) / 1e9,
            latency_s=small_s,
        )

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            self._transport.unregister(memory)
        except FerryError as error:
            # The measurement is valid all the same. The transport may still use the memory, so it stays allocated.
            logger.warning("the scratch memory of a self-test stays registered: %s", error)
            _unsettled.append(self)


def _without_fixed_cost(small_s: float, elapsed_s: float) -> float:
    """The time of a copy without the fixed cost of every copy, such as noticing its end. At least half of it: the small
    copy may have been slow by chance."""
    return max(elapsed_s - small_s, elapsed_s / 2)


# Tests whose scratch memory may still be written to: it is never freed.
_unsettled: list[SelfTest] = []


def measure(
    transport: Transport, peer: str, probe: Probe, clock: Callable[[], float] = time.perf_counter
) -> Measurement:
    """Run one test now, in at most about a second; never raises because of the peer.

    It polls the transport, so no other ticket may be open; use `SelfTest` where one may be. After a failure the
    transport may later report a ticket that the caller does not know.
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
