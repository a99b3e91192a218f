"""The copies that a self-test makes, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.copies import Copies, Direction
from kvferry.transport.probe import Probe

__all__ = ["NUM_WRITES", "READS", "ROW_BYTES", "WRITES", "Kind", "Step", "num_row_bytes", "reading", "writing"]

LATENCY_BYTES = 4096
ROW_BYTES = 4096
# The first touches pages for the first time and has UCX connect.
NUM_SMALL = 3
NUM_READS = 3
NUM_WRITES = 3


class Kind(StrEnum):
    """What a copy of the self-test is for."""

    LATENCY = "latency"
    WHOLE = "whole"
    ROWS = "rows"
    MARK = "mark"
    MARK_BACK = "mark back"
    WRITE_WHOLE = "write whole"
    WRITE_ROWS = "write rows"
    WHOLE_BACK = "whole back"


READS = (Kind.LATENCY, Kind.WHOLE, Kind.ROWS)
WRITES = (Kind.MARK, Kind.WRITE_WHOLE, Kind.WRITE_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One copy of the self-test; `copies.target` or `copies.source` is its scratch memory."""

    kind: Kind
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


def reading(probe: Probe, scratch_address: int) -> list[Step]:
    """Some small reads, then every other page of the probe in rows of their own, then all of it in one row.

    The last one leaves the whole pattern in the scratch memory, for the writes.
    """
    starts = _starts(probe)
    rows = _copies(probe, scratch_address, starts, ROW_BYTES)
    whole = _copies(probe, scratch_address, starts[:1], probe.size_bytes)
    small = _copies(probe, scratch_address, starts[:1], LATENCY_BYTES)
    smalls = [Step(Kind.LATENCY, small)] * NUM_SMALL
    return [*smalls, *[Step(Kind.ROWS, rows)] * NUM_READS, *[Step(Kind.WHOLE, whole)] * NUM_READS]


def writing(probe: Probe, scratch_address: int) -> list[Step]:
    """The same to the peer, and a last look at what is there now."""
    starts = _starts(probe)
    rows = _swapped(_copies(probe, scratch_address, starts, ROW_BYTES))
    whole = _copies(probe, scratch_address, starts[:1], probe.size_bytes)
    writes = [*[Step(Kind.WRITE_WHOLE, _swapped(whole))] * NUM_WRITES, *[Step(Kind.WRITE_ROWS, rows)] * NUM_WRITES]
    return [*writes, Step(Kind.WHOLE_BACK, whole)]


def _starts(probe: Probe) -> NDArray[np.uint64]:
    return np.arange(num_row_bytes(probe.size_bytes) // ROW_BYTES, dtype=np.uint64) * np.uint64(2 * ROW_BYTES)


def _swapped(copies: Copies) -> Copies:
    return Copies(copies.target, copies.source, copies.length, copies.pieces)


def _copies(probe: Probe, scratch_address: int, starts: NDArray[np.uint64], length: int) -> Copies:
    return Copies(
        source=starts + np.uint64(probe.address),
        target=starts + np.uint64(scratch_address),
        length=np.full(len(starts), length, np.uint64),
        pieces=len(starts),
    )
