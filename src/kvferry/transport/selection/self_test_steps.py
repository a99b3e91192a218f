"""The steps of a self-test: which copies it makes, in which order."""

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
# The first round touches pages for the first time and makes UCX connect. The best time counts: a copy that has lost
# its time slice to another process says nothing about the transport.
NUM_ROUNDS = 3


class StepKind(StrEnum):
    """The purpose of a step."""

    LATENCY = "latency"
    WHOLE = "whole"
    ROWS = "rows"
    MARK = "mark"
    MARK_BACK = "mark back"
    WRITE_WHOLE = "write whole"
    WRITE_ROWS = "write rows"
    WHOLE_BACK = "whole back"


WHOLE = np.zeros(1, np.uint64)
"""The start of the only row of a copy."""
READS = (StepKind.LATENCY, StepKind.WHOLE, StepKind.ROWS)
WRITES = (StepKind.MARK, StepKind.WRITE_WHOLE, StepKind.WRITE_ROWS)


@dataclass(frozen=True, slots=True)
class ScratchBuffer:
    """The local memory of a self-test, from `address` on: a buffer for reads, then one for writes, then a mark.

    Reads never land in the write buffer, so that no wrong byte ever goes back to the peer."""

    address: int
    probe: Probe

    @property
    def size_bytes(self) -> int:
        """The size of all of it; a probe that may only be read needs no write buffer and no mark."""
        return 2 * self.probe.size_bytes + MARK_BYTES if self.probe.is_writable else self.probe.size_bytes

    @property
    def write_address(self) -> int:
        """The address of the write buffer."""
        return self.address + self.probe.size_bytes

    @property
    def mark_address(self) -> int:
        """The address of the mark."""
        return self.write_address + self.probe.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One copy of the self-test, between the peer's probe and the scratch buffer."""

    kind: StepKind
    copies: Copies

    @property
    def direction(self) -> Direction:
        return Direction.WRITE if self.kind in WRITES else Direction.READ

    @property
    def is_for_writing(self) -> bool:
        """Whether its failure says nothing about reading."""
        return self.kind not in READS


def num_row_bytes(size_bytes: int) -> int:
    return size_bytes // (2 * ROW_BYTES) * ROW_BYTES


def all_steps(scratch: ScratchBuffer, marks: Sequence[int]) -> list[Step]:
    """Reads and writes alternate, several times: a short disturbance then slows both directions down.

    `marks` are remote addresses of the mark to write: one, or none where writing has been verified already.
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
    """Write the mark to the remote address `mark`, and read it back."""
    write, back = (_copies(mark, local, WHOLE, MARK_BYTES) for local in (scratch.mark_address, scratch.address))
    return Step(StepKind.MARK, _swapped(write)), Step(StepKind.MARK_BACK, back)


def _reads(scratch: ScratchBuffer) -> list[Step]:
    """A small copy, every other page of the probe as a row, and the whole probe in one row."""
    remote, local, size_bytes = scratch.probe.address, scratch.address, scratch.probe.size_bytes
    return [
        Step(StepKind.LATENCY, _copies(remote, local, WHOLE, LATENCY_BYTES)),
        Step(StepKind.ROWS, _copies(remote, local, _starts(size_bytes), ROW_BYTES)),
        Step(StepKind.WHOLE, _copies(remote, local, WHOLE, size_bytes)),
    ]


def _writes(scratch: ScratchBuffer) -> list[Step]:
    """The same two to the peer; the small copy is the mark."""
    remote, local, size_bytes = scratch.probe.address, scratch.write_address, scratch.probe.size_bytes
    return [
        Step(StepKind.WRITE_ROWS, _swapped(_copies(remote, local, _starts(size_bytes), ROW_BYTES))),
        Step(StepKind.WRITE_WHOLE, _swapped(_copies(remote, local, WHOLE, size_bytes))),
    ]


def _starts(size_bytes: int) -> NDArray[np.uint64]:
    return np.arange(num_row_bytes(size_bytes) // ROW_BYTES, dtype=np.uint64) * np.uint64(2 * ROW_BYTES)


def _swapped(copies: Copies) -> Copies:
    """The same rows, written."""
    return Copies(copies.target, copies.source, copies.length, copies.pieces)


def _copies(remote: int, local: int, starts: NDArray[np.uint64], length: int) -> Copies:
    """A read of rows of `length` bytes that begin at `starts` on both sides."""
    return Copies(
        source=starts + np.uint64(remote),
        target=starts + np.uint64(local),
        length=np.full(len(starts), length, np.uint64),
        pieces=len(starts),
    )
