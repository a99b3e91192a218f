"""A queue of copies inside one address space, worked off in bounded slices by whoever polls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Ticket
from kvferry.transport.registered_memory import Pieces
from kvferry.transport.rowcopy.gather_scatter import copy_rows

TURN_BYTES = 64 << 20
"""Whoever waits behind a long ticket waits for no more than this, ten milliseconds or so. If tickets of about one size
took turns more often, all would end when the last does, instead of one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """What to copy, between this process's pieces and a peer's, both of which have views."""

    peer: str
    local: Pieces
    remote: Pieces
    copies: Copies
    direction: Direction


@dataclass(slots=True, eq=False)
class Job:
    """A posted copy: `work` copies when iterated; `remote_addresses` are the peer's pieces that it touches. So much is
    left of its turn."""

    ticket: Ticket
    peer: str
    work: Iterator[int]
    remote_addresses: frozenset[int]
    turn_bytes: int = TURN_BYTES


class CopyQueue:
    """Tickets in their order, and in turns where they are long, so that a long one does not hold up a short one."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._jobs: deque[Job] = deque()
        self._ended: list[Completion] = []

    def add(self, posting: Posting) -> Ticket:
        """Check every row and queue the copy. Raises TransportError when a row leaves the pieces of either side."""
        copies = posting.copies
        local, remote = f"this process ({posting.direction})", f"peer {posting.peer!r} ({posting.direction})"
        if posting.direction is Direction.READ:
            source = posting.remote.side(copies.source, copies.length, remote)
            target = posting.local.side(copies.target, copies.length, local)
            far = source
        else:
            source = posting.local.side(copies.source, copies.length, local)
            target = posting.remote.side(copies.target, copies.length, remote)
            far = target
        work = copy_rows(source, target, copies.length.view(np.int64))
        touched = frozenset(far.starts[number] for number in far.used)
        job = Job(Ticket(next(self._numbers)), posting.peer, work, touched)
        self._jobs.append(job)
        return job.ticket

    def drop(self, where: Callable[[Job], bool], error: str) -> None:
        """End these tickets with an error; nothing of them is copied any more."""
        dropped = [job for job in self._jobs if where(job)]
        self._jobs = deque(job for job in self._jobs if not where(job))
        self._ended += [Completion(job.ticket, error) for job in dropped]

    def run(self, max_bytes: int) -> list[Completion]:
        """Copy about `max_bytes` at most and return the tickets that ended since the last call."""
        while self._jobs and max_bytes > 0:
            max_bytes -= self._advance(self._jobs.popleft(), max_bytes)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, job: Job, max_bytes: int) -> int:
        copied = 0
        for num_bytes in job.work:
            copied += num_bytes
            job.turn_bytes -= num_bytes
            if job.turn_bytes <= 0:
                job.turn_bytes = TURN_BYTES
                self._jobs.append(job)
                return copied
            if copied >= max_bytes:
                self._jobs.appendleft(job)
                return copied
        self._ended.append(Completion(job.ticket, ""))
        return copied
