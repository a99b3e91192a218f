"""What bounds a staged transfer: its own gathers, writes and scatters, alone, all at once with none waiting for
another, and as a bare pipeline.

The rows are those that the sessions would plan, copied as the agents' movers do; the writes are slots of the arena. The
pipeline gathers, writes and scatters on a thread each, and has as many slots as agents have, but nothing is planned,
asked or verified: all that travels beside the slots is a byte through a pipe for each that is filled, and one for each
that is emptied.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from threading import Event, Semaphore

import numpy as np
from mixed_tp_cases import Request, Rig
from mixed_tp_nixl import PROGRESS_S, PlainNixl

from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.tiles import Tile
from kvferry.session.target.reads.slot_pipeline import WINDOW
from kvferry.staging.host_mover import HostMover, host_regions
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions
from kvferry.transport.rowcopy.gather_scatter import copy_tiles
from kvferry.transport.shm.shared_memory import allocate_shared

__all__ = ["Chain", "Signals", "SourceStages", "TargetStages", "mover_runs", "run_chains"]

Chain = Callable[[], None]

STAGE_S = 60.0
"""Nothing takes as long: who waits longer waits for a stage that has failed."""


@dataclass(frozen=True, slots=True)
class Signals:
    """One process's ends of two pipes, which carry a byte for every slot that was filled, and that was emptied."""

    filled: int
    emptied: int

    @classmethod
    def pair(cls) -> tuple[Signals, Signals]:
        """Those of the target and those of a source."""
        filled, emptied = os.pipe(), os.pipe()
        return cls(filled[0], emptied[1]), cls(filled[1], emptied[0])

    def close(self) -> None:
        os.close(self.filled)
        os.close(self.emptied)


def copy_now(pieces: Regions, tiles: Sequence[Tile]) -> None:
    """What a mover does for a slot, on this thread."""
    for _ in copy_tiles(pieces, tiles):
        pass


def wait_for(semaphore: Semaphore) -> None:
    if not semaphore.acquire(timeout=STAGE_S):
        raise RuntimeError("a stage waits for one that has failed")


def read_byte(pipe: int) -> None:
    if not (select.select([pipe], [], [], STAGE_S)[0] and os.read(pipe, 1)):
        raise RuntimeError("a stage waits for a process that has failed")


def mover_runs(mover: HostMover, rang: Event, jobs: Sequence[Sequence[Tile]]) -> None:
    """Have a mover copy everything, one job after the other, and wait for the end."""
    for key, tiles in enumerate(jobs):
        mover.start(key, tiles)
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
        self._regions = host_regions([memory, self.arena.memory])
        self._mover = HostMover(self._regions, self._rang.set)
        self._gathers: list[list[Tile]] = []
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
            self._gathers.append([tile.shifted(0, here) for tile in slot.gather])
            self._writes.append(slot.wire.shifted(here, ring + skip))
        return len(slots)

    def gather(self) -> None:
        mover_runs(self._mover, self._rang, self._gathers)

    def wire(self, nixl: PlainNixl, peer: str) -> None:
        for copies in self._writes:
            self._write(nixl, peer, copies)

    def _write(self, nixl: PlainNixl, peer: str, copies: Copies) -> None:
        prepared = nixl.prepare(peer, copies, Direction.WRITE)
        nixl.run([prepared])
        prepared.release()

    def pipeline(self, nixl: PlainNixl, peer: str, signals: Signals) -> None:
        """Gather on one thread, write on this one; a slot is used again when it has been written or emptied."""
        gathered, written = Semaphore(0), Semaphore(WINDOW)

        def gather() -> None:
            for tiles in self._gathers:
                wait_for(written)
                copy_now(self._regions, tiles)
                gathered.release()

        with ThreadPoolExecutor(1) as pool:
            gathering = pool.submit(gather)
            for number, copies in enumerate(self._writes):
                wait_for(gathered)
                if number >= WINDOW:
                    read_byte(signals.emptied)
                self._write(nixl, peer, copies)
                os.write(signals.filled, b".")
                written.release()
            gathering.result()
        for _ in self._writes[-WINDOW:]:
            read_byte(signals.emptied)


class TargetStages:
    """The scatters of target rank 0, from slots of all its sources."""

    def __init__(self, rig: Rig, memory: Memory) -> None:
        self._rig, self._memory = rig, memory
        self.arena = allocate_shared(len(rig.readable) * WINDOW * rig.slot_bytes, "benchmark-arena")
        np.frombuffer(self.arena.buffer, np.uint8)[:] = 1
        self._rang = Event()
        self._regions = host_regions([memory, self.arena.memory])
        self._mover = HostMover(self._regions, self._rang.set)
        self._scatters: dict[int, list[list[Tile]]] = {}

    def ring(self, rank: int) -> int:
        """Where the slots for a source rank lie."""
        return self.arena.memory.address + rank * WINDOW * self._rig.slot_bytes

    def prepare(self, request: Request) -> None:
        self._scatters = {}
        for rank in self._rig.readable:
            plan = self._rig.slots(rank, 0, self._memory.address, request)
            slots = [slot for stretch in range(len(plan.stretches)) for slot in plan.slots(stretch)]
            places = [self.ring(rank) + number % WINDOW * self._rig.slot_bytes for number in range(len(slots))]
            self._scatters[rank] = [
                [tile.shifted(place, 0) for tile in slot.scatter] for slot, place in zip(slots, places, strict=True)
            ]

    def scatter(self) -> None:
        """The first slot of every rank, then the second, and so on."""
        in_turns = zip_longest(*self._scatters.values())
        mover_runs(self._mover, self._rang, [tiles for turn in in_turns for tiles in turn if tiles is not None])

    def pipeline(self, signals: Mapping[int, Signals], progress: Callable[[], None]) -> None:
        """Scatter what the source ranks have filled, in the order in which it comes; where nothing does, let NIXL make
        progress, as agents do: until both are connected, a source waits for that."""
        todo = {signals[rank].filled: (signals[rank].emptied, iter(each)) for rank, each in self._scatters.items()}
        left = sum(map(len, self._scatters.values()))
        deadline = time.monotonic() + STAGE_S
        while left:
            ready = select.select(list(todo), [], [], PROGRESS_S)[0]
            if not ready:
                progress()
            if time.monotonic() > deadline:
                raise RuntimeError("no slot comes any more")
            for filled in ready:
                read_byte(filled)
                emptied, slots = todo[filled]
                copy_now(self._regions, next(slots))
                os.write(emptied, b".")
                left -= 1

    def close(self) -> None:
        self._mover.close()
