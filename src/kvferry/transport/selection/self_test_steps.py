"""The copies that a self-test makes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Copies, Direction
from kvferry.transport.selection.probe import MARK_BYTES, Probe

LATENCY_BYTES = 4096
ROW_BYTES = 4096
# The first touches pages for the first time and has UCX connect. Of the others the best counts: a copy that has lost
# its time slice to another process says nothing about the transport.
NUM_ROUNDS = 3


class StepKind(StrEnum):
    """What a copy of the self-test is for."""

    LATENCY = "latency"
    WHOLE = "whole"
    ROWS = "rows"
    MARK = "mark"
    MARK_BACK = "mark back"
    WRITE_WHOLE = "write whole"
    WRITE_ROWS = "write rows"
    WHOLE_BACK = "whole back"


WHOLE = np.zeros(1, np.uint64)
"""Where the only row of a copy starts."""
READS = (StepKind.LATENCY, StepKind.WHOLE, StepKind.ROWS)
WRITES = (StepKind.MARK, StepKind.WRITE_WHOLE, StepKind.WRITE_ROWS)


@dataclass(frozen=True, slots=True)
class ScratchBuffer:
    """Memory of a self-test, from `address` on. What is read comes first; what is written, behind it, is never read
    into, so that no wrong byte ever goes back to the peer; a mark of our own comes last."""

    address: int
    probe: Probe

    @property
    def size_bytes(self) -> int:
        """Of all of it; for a probe that may only be read there is nothing to write."""
        return 2 * self.probe.size_bytes + MARK_BYTES if self.probe.is_writable else self.probe.size_bytes

    @property
    def written(self) -> int:
        """Where what is written begins."""
        return self.address + self.probe.size_bytes

    @property
    def mark(self) -> int:
        """Where the mark is."""
        return self.written + self.probe.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One copy of the self-test; `copies.target` or `copies.source` is its scratch memory."""

    kind: StepKind
    copies: Copies

    @property
    def direction(self) -> Direction:
        return Direction.WRITE if self.kind in WRITES else Direction.READ

    @property
    def is_for_writing(self) -> bool:
        """Whether a failure of it says nothing about reading."""
        return self.kind not in READS


def num_row_bytes(size_bytes: int) -> int:
    return size_bytes // (2 * ROW_BYTES) * ROW_BYTES


def all_steps(scratch: ScratchBuffer, marks: Sequence[int]) -> list[Step]:
    """Reads and writes in turn, several times: whatever slows one direction down for a moment meets the other, too.

    `marks` are the addresses there of the mark to write: one, or none where that writes arrive is already registered.
    """
    steps: list[Step] = []
    for number in range(NUM_ROUNDS):
        steps += _reads(scratch)
        if scratch.probe.is_writable:
            is_last = number == NUM_ROUNDS - 1
            steps += [step for mark in marks for step in mark_steps(scratch, mark)[: 2 if is_last else 1]]
            steps += _writes(scratch)
    back = _copies(scratch.probe.address, scratch.address, WHOLE, scratch.probe.size_bytes)
    return [*steps, Step(StepKind.WHOLE_BACK, back)] if scratch.probe.is_writable else steps


def mark_steps(scratch: ScratchBuffer, mark: int) -> tuple[Step, Step]:
    """Write the mark to the address `mark` there, and read it back."""
    write, back = (_copies(mark, near, WHOLE, MARK_BYTES) for near in (scratch.mark, scratch.address))
    return Step(StepKind.MARK, _swapped(write)), Step(StepKind.MARK_BACK, back)


def _reads(scratch: ScratchBuffer) -> list[Step]:
    """A small one, every other page of the probe in rows of their own, and all of it in one row."""
    far, near, size_bytes = scratch.probe.address, scratch.address, scratch.probe.size_bytes
    return [
        Step(StepKind.LATENCY, _copies(far, near, WHOLE, LATENCY_BYTES)),
        Step(StepKind.ROWS, _copies(far, near, _starts(size_bytes), ROW_BYTES)),
        Step(StepKind.WHOLE, _copies(far, near, WHOLE, size_bytes)),
    ]


def _writes(scratch: ScratchBuffer) -> list[Step]:
    """The same to the peer; its small one is the mark."""
    far, near, size_bytes = scratch.probe.address, scratch.written, scratch.probe.size_bytes
    return [
        Step(StepKind.WRITE_ROWS, _swapped(_copies(far, near, _starts(size_bytes), ROW_BYTES))),
        Step(StepKind.WRITE_WHOLE, _swapped(_copies(far, near, WHOLE, size_bytes))),
    ]


def _starts(size_bytes: int) -> NDArray[np.uint64]:
    return np.arange(num_row_bytes(size_bytes) // ROW_BYTES, dtype=np.uint64) * np.uint64(2 * ROW_BYTES)


def _swapped(copies: Copies) -> Copies:
    return Copies(copies.target, copies.source, copies.length, copies.pieces)


def _copies(far: int, near: int, starts: NDArray[np.uint64], length: int) -> Copies:
    """Rows of `length` bytes that begin at `starts` on both sides; read, that is."""
    return Copies(
        source=starts + np.uint64(far),
        target=starts + np.uint64(near),
        length=np.full(len(starts), length, np.uint64),
        pieces=len(starts),
    )
