"""What bounds a staged transfer: its own gathers, writes and scatters, alone and all at once, none waiting for another.

The rows are those that the sessions would plan, copied by the mover of the agents; the writes are slots of the arena.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
from mixed_tp_cases import Request, Rig
from mixed_tp_nixl import PlainNixl

from kvferry.plan.copies import Copies, Direction
from kvferry.session.slot_use import shifted
from kvferry.session.unpacking import WINDOW
from kvferry.staging.host_mover import HostMover, host_pieces
from kvferry.transport.base import Memory
from kvferry.transport.shared_memory import allocate_shared

__all__ = ["Chain", "SourceStages", "TargetStages", "mover_runs", "run_chains"]

Chain = Callable[[], None]


def mover_runs(mover: HostMover, rang: Event, jobs: Sequence[Copies]) -> None:
    """Have a mover copy everything, one job after the other, and wait for the end."""
    for key, copies in enumerate(jobs):
        mover.start(key, copies)
    left = len(jobs)
    while left:
        rang.wait(5.0)
        rang.clear()
        for moved in mover.poll():
            if moved.error:
                raise RuntimeError(moved.error)
            left -= 1


def run_chains(chains: dict[str, Chain], begin_at: float) -> dict[str, tuple[float, float]]:
    """Run them at once from a moment on; when each began and ended."""

    def timed(chain: Chain) -> tuple[float, float]:
        time.sleep(max(0.0, begin_at - time.monotonic()))
        began = time.monotonic()
        chain()
        return began, time.monotonic()

    with ThreadPoolExecutor(max(1, len(chains))) as pool:
        running = {name: pool.submit(timed, chain) for name, chain in chains.items()}
        return {name: each.result() for name, each in running.items()}


class SourceStages:
    """The gathers and writes of one source rank."""

    def __init__(self, rig: Rig, rank: int, memory: Memory) -> None:
        self._rig, self._rank, self._memory = rig, rank, memory
        self.arena = allocate_shared(WINDOW * rig.slot_bytes, "benchmark-arena")
        self._rang = Event()
        self._mover = HostMover(host_pieces([memory, self.arena.memory]), self._rang.set)
        self._gathers: list[Copies] = []
        self._writes: list[Copies] = []
        self.run = run_chains

    def prepare(self, request: Request, ring: int) -> int:
        """`ring` is where the target's slots for this rank lie. Returns the number of slots."""
        plan = self._rig.slots(self._rank, self._memory.address, 0, request)
        slots = [slot for stretch in range(len(plan.stretches)) for slot in plan.slots(stretch)]
        self._gathers, self._writes = [], []
        for number, slot in enumerate(slots):
            skip = number % WINDOW * self._rig.slot_bytes
            here = self.arena.memory.address + skip
            self._gathers.append(shifted(slot.stages.gather, 0, here))
            self._writes.append(shifted(slot.stages.wire, here, ring + skip))
        return len(slots)

    def gather(self) -> None:
        mover_runs(self._mover, self._rang, self._gathers)

    def wire(self, nixl: PlainNixl, peer: str) -> None:
        for copies in self._writes:
            prepared = nixl.prepare(peer, copies, Direction.WRITE)
            nixl.run([prepared])
            prepared.release()


class TargetStages:
    """The scatters of target rank 0, from slots of all its sources."""

    def __init__(self, rig: Rig, memory: Memory) -> None:
        self._rig, self._memory = rig, memory
        self.arena = allocate_shared(len(rig.readable) * WINDOW * rig.slot_bytes, "benchmark-arena")
        np.frombuffer(self.arena.buffer, np.uint8)[:] = 1
        self._rang = Event()
        self._mover = HostMover(host_pieces([memory, self.arena.memory]), self._rang.set)
        self._scatters: list[Copies] = []

    def ring(self, rank: int) -> int:
        """Where the slots for a source rank lie."""
        return self.arena.memory.address + rank * WINDOW * self._rig.slot_bytes

    def prepare(self, request: Request) -> None:
        found: list[tuple[int, Copies]] = []
        for rank in self._rig.readable:
            plan = self._rig.slots(rank, 0, self._memory.address, request)
            slots = [slot for stretch in range(len(plan.stretches)) for slot in plan.slots(stretch)]
            for number, slot in enumerate(slots):
                skip = number % WINDOW * self._rig.slot_bytes
                found.append((number, shifted(slot.stages.scatter, self.ring(rank) + skip, 0)))
        self._scatters = [copies for _, copies in sorted(found, key=lambda each: each[0])]

    def scatter(self) -> None:
        mover_runs(self._mover, self._rang, self._scatters)

    def close(self) -> None:
        self._mover.close()
