"""A queue of copies that the calling thread makes, in bounded slices, whenever it polls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvferry.errors import TransportError
from kvferry.transport.base import Completion, Direction, Ticket
from kvferry.transport.posting import Posting
from kvferry.transport.rowcopy.gather_scatter import copy_rows

SLICE_BYTES = 16 << 20
"""One poll copies about this much: a few milliseconds."""
QUANTUM_BYTES = 64 << 20
"""A ticket copies this much, ten milliseconds or so, before the next one goes on. With a smaller quantum, tickets of
about one size would all end when the last one does, instead of one after the other."""


@dataclass(slots=True, eq=False)
class Job:
    """An open ticket. `work` copies when iterated and yields how many bytes; `quantum_bytes` is what is left of its
    quantum."""

    ticket: Ticket
    peer: str
    work: Iterator[int]
    quantum_bytes: int = QUANTUM_BYTES


class CopyQueue:
    """Tickets in their order, a long one by quanta, so that it does not hold up a short one."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._jobs: deque[Job] = deque()
        self._ended: list[Completion] = []
        self.num_moved = 0
        """Bytes, all together."""

    def add(self, posting: Posting) -> Ticket:
        """Queue a copy in memory. Raises TransportError when a row leaves the regions of either side."""
        local, remote = posting.located()
        source, target = (remote, local) if posting.direction is Direction.READ else (local, remote)
        return self.submit(posting.peer, copy_rows(source, target, posting.copies.length.view(np.int64)))

    def submit(self, peer: str, work: Iterator[int]) -> Ticket:
        """Queue any work. A TransportError that it raises ends its ticket."""
        job = Job(Ticket(next(self._numbers)), peer, work)
        self._jobs.append(job)
        return job.ticket

    def drop(self, where: Callable[[Job], bool], error: str) -> None:
        """End these tickets with an error; nothing of them is copied any more."""
        self._ended += [Completion(job.ticket, error) for job in self._jobs if where(job)]
        self._jobs = deque(job for job in self._jobs if not where(job))

    def run(self) -> list[Completion]:
        """Copy about `SLICE_BYTES` at most and return the tickets that ended since the last call."""
        max_bytes = SLICE_BYTES
        while self._jobs and max_bytes > 0:
            max_bytes -= self._advance(self._jobs.popleft(), max_bytes)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, job: Job, max_bytes: int) -> int:
        copied, error = 0, ""
        try:
            for num_bytes in job.work:
                copied += num_bytes
                self.num_moved += num_bytes
                job.quantum_bytes -= num_bytes
                if job.quantum_bytes <= 0:
                    job.quantum_bytes = QUANTUM_BYTES
                    self._jobs.append(job)
                    return copied
                if copied >= max_bytes:
                    self._jobs.appendleft(job)
                    return copied
        except TransportError as failure:
            error = str(failure)
        self._ended.append(Completion(job.ticket, error))
        return copied
