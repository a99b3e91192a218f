"""Staging memory of one rank: slots of real pools, poisoned when they come back, and copies that take time. Some slots
of targets are as near to a source as its own: it gathers into them, in turns of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.errors import FerryError
from kvferry.plan.programs.tiles import rows_of
from kvferry.session.commands import Acquire, Stage
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import ReadKey, Remote, SlotKey, incarnation_of
from kvferry.staging.pool import ENGINE_SHARE, Pool
from simulator.context import RunContext
from simulator.state.memory import RankMemory
from simulator.state.rank import Copy, Rank

NUM_STEPS = 3
FAST_S = 0.005
# With a slow ticket it still takes less than a slot may take.
MAX_SLOW_S = 4.0
POISON = np.uint8(37)
FAR = 0.5
"""How often a slot of a target is near enough to be gathered into."""


@dataclass(frozen=True, slots=True)
class StagerCallbacks:
    """What a stager is connected to: `later` puts something off to another turn, `then` is told what has happened, one
    event after another, `watch` is asked before bytes of a copy move, and whether they are its last, and `reach` whose
    memory a peer's is."""

    later: Callable[[Callable[[], None]], None]
    then: Callable[[Acquired | Staged], None]
    watch: Callable[[Copy, bool], None]
    reach: Callable[[Remote], Rank | None]


class Stager:
    """What `kvferry.agent` does with its own, on virtual time."""

    def __init__(self, context: RunContext, rank: Rank, ends: StagerCallbacks) -> None:
        self._context, self._rank, self._ends = context, rank, ends
        half_bytes = rank.memory.arena_bytes // 2
        most_bytes = ENGINE_SHARE * half_bytes
        self._incoming, self._outgoing = (Pool(half_bytes, 1, most_bytes, incarnation_of) for _ in range(2))
        self._near_slots = Pool(half_bytes, 1)
        self._events: list[Acquired | Staged] = []
        self._is_due = False
        # Slots of targets: whose each is, and where.
        self._far: dict[SlotKey, tuple[Rank, int]] = {}

    @property
    def num_open(self) -> int:
        """Slots that are held or waited for."""
        return sum(pool.num_held + pool.num_waiting for pool in (self._incoming, self._outgoing, self._near_slots))

    def acquire(self, command: Acquire) -> None:
        """Get in line, for a slot of ours or, if it is as good, for the turn of the target's own."""
        key, num_bytes = command.key, command.num_bytes
        far = self._ends.reach(key.remote) if command.peer_address else None
        if far is not None and self._context.scheduler.chance(FAR):
            self._far[key] = far, command.peer_address
            num_bytes = min(num_bytes, self._near_slots.size_bytes)
        try:
            self._pool_of(key).ask(key, key.remote, num_bytes)
        except FerryError as error:
            self._context.log.fault("slot too large", str(key.remote))
            self._events.append(Acquired(key, 0, str(error)))
        self._due()

    def release(self, key: SlotKey) -> None:
        """Give back, or leave the line. The next who has a slot there finds other bytes in it, and at once."""
        if key in self._pool_of(key):
            self._pool_of(key).release(key)
        self._far.pop(key, None)
        extent = self._rank.slots.pop(key, range(0))
        self._rank.memory.bytes[extent.start : extent.stop] += POISON
        self._due()

    def stage(self, command: Stage) -> None:
        """Gather or scatter: some slowly, some not to the end."""
        scheduler, faults, rows = self._context.scheduler, self._context.faults, rows_of(command.tiles)
        far, _ = self._far.get(command.key, (None, 0))
        source = self._rank.memory.indices(rows.source, rows)
        target = self._memory_at(far).indices(rows.target, rows)
        slow, fails = scheduler.chance(faults.slow), scheduler.chance(faults.copy_fail)
        step_s = scheduler.between(0.0, MAX_SLOW_S if slow else FAST_S) / NUM_STEPS
        fails_at = scheduler.rng.randint(0, len(source)) if fails else len(source) + 1
        for name, chosen in (("slow copy", slow), ("failing copy", fails)):
            if chosen:
                self._context.log.fault(name, str(command.key.remote))
        self._rank.copies[command.key] = copy = Copy(command.key, source, target, step_s, fails_at, far)
        scheduler.after(step_s, lambda: self._step(copy))

    def _step(self, copy: Copy) -> None:
        """Move the next third of the bytes, unless the process is gone."""
        if self._rank.copies.get(copy.key) is not copy:
            return
        num_bytes = len(copy.source)
        end = min(num_bytes, copy.moved + max(1, -(-num_bytes // NUM_STEPS)), copy.fails_at)
        part = slice(copy.moved, end)
        self._ends.watch(copy, end == num_bytes < copy.fails_at)
        self._memory_at(copy.far).bytes[copy.target[part]] = self._rank.memory.bytes[copy.source[part]]
        copy.moved = end
        if end == copy.fails_at or end == num_bytes:
            del self._rank.copies[copy.key]
            self._events.append(Staged(copy.key, "injected fault" if end == copy.fails_at else ""))
            self._due()
        else:
            self._context.scheduler.after(copy.step_s, lambda: self._step(copy))

    def _memory_at(self, far: Rank | None) -> RankMemory:
        return (far or self._rank).memory

    def _due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._ends.later(self._poll)

    def _poll(self) -> None:
        """As an agent does: see what has happened, then tell of it, one after another."""
        self._is_due = False
        events, self._events = self._events, []
        memory = self._rank.memory
        address = memory.arena_address
        for pool in (self._incoming, self._outgoing):
            for slot in pool.grants():
                if isinstance(slot.key, SlotKey):
                    start = address + slot.offset - memory.map.base
                    self._rank.slots[slot.key] = range(start, start + slot.num_bytes)
                    events.append(Acquired(slot.key, address + slot.offset))
            address += pool.size_bytes
        keys = [slot.key for slot in self._near_slots.grants() if isinstance(slot.key, SlotKey)]
        events += [Acquired(key, self._far[key][1], is_peer_slot=True) for key in keys]
        for event in events:
            self._ends.then(event)

    def close(self) -> None:
        """The process is gone."""
        self._rank.copies.clear()

    def _pool_of(self, key: SlotKey) -> Pool:
        if key in self._far:
            return self._near_slots
        return self._incoming if isinstance(key.work, ReadKey) else self._outgoing
