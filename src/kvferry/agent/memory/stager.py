"""The staging memory of one agent: who has which slot of it, and what is copied between slots and blocks.

Slots for what comes in and slots for what goes out are apart: a target's slot is held until a source has filled it, and
if sources could not get slots of their own because of that, two engines could wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack

from kvferry.agent.memory.peer_slots import FarSlots
from kvferry.errors import FerryError
from kvferry.session.commands import Acquire, Stage
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import ReadKey, SlotKey, incarnation_of
from kvferry.staging.mover import Mover
from kvferry.staging.pool import ENGINE_SHARE, Pool, Slot
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import View

StagerEvent = Acquired | Staged


class Stager:
    """Belongs to one thread. `arena` is the staging memory, registered with the transports already; `far` are the slots
    of targets that can be reached without a transport: into them `gathered_bytes` have been gathered."""

    def __init__(self, arena: Memory, mover: Mover, far: FarSlots) -> None:
        half_bytes = arena.size_bytes // 2
        self._arena = arena
        # An engine that hangs keeps its slots: the rest is for others.
        most_bytes = ENGINE_SHARE * half_bytes
        self._incoming, self._outgoing = (
            Pool(half_bytes, most_bytes=most_bytes, share_of=incarnation_of) for _ in range(2)
        )
        # Slots of targets take turns as if they were ours: so no target's gathers keep everybody else's copies waiting.
        self._lent = Pool(half_bytes)
        self._outgoing_address = arena.address + half_bytes
        self._mover, self._far = mover, far
        # What is mapped stays so while a copy may touch it.
        self._views: dict[Hashable, View] = {}
        self.gathered_bytes = 0
        self._answers: list[Acquired] = []
        self._is_changed = False
        self._resources = ExitStack()
        self._resources.callback(self._views.clear)
        self._resources.callback(mover.close)

    @property
    def busy(self) -> bool:
        """Whether copies are under way whose end only `poll` finds out."""
        return self._mover.busy and not self._mover.rings

    @property
    def is_changed(self) -> bool:
        """Whether `poll` may have something at once: a slot was asked for, or given back."""
        return self._is_changed

    @property
    def num_slots(self) -> int:
        """Slots that are held or waited for, of ours or of targets. May be asked from any thread."""
        return sum(pool.num_held + pool.num_waiting for pool in (self._incoming, self._outgoing, self._lent))

    def acquire(self, command: Acquire) -> None:
        """Get in line; peers take turns. Where the target's own slot can be reached, that one is as good."""
        self._is_changed = True
        key, num_bytes = command.key, command.num_bytes
        view = self._far.find(key.remote, command.far_address, num_bytes)
        try:
            if view is None:
                self._pool_of(key).ask(key, key.remote, num_bytes)
            else:
                self._lent.ask(key, key.remote, min(num_bytes, self._lent.size_bytes))
                self._views[key] = view
        except FerryError as error:
            self._answers.append(Acquired(key, 0, str(error)))

    def release(self, key: SlotKey) -> None:
        """Give back, or leave the line."""
        self._is_changed = True
        pool = self._pool_of(key)
        self._views.pop(key, None)
        if key in pool:
            pool.release(key)

    def stage(self, command: Stage) -> None:
        """Gather or scatter."""
        self._mover.start(command.key, command.tiles, self._views.get(command.key))

    def poll(self) -> list[StagerEvent]:
        """The slots that are served now, and the copies that have ended."""
        self._far.poll()
        ended = self._mover.poll()
        events: list[StagerEvent] = [Staged(key, error) for key, error in ended if isinstance(key, SlotKey)]
        self.gathered_bytes += sum(self._views[key].size for key, error in ended if key in self._views and not error)
        if not self._is_changed:
            return events
        events += self._answers
        self._answers, self._is_changed = [], False
        for pool, address in ((self._incoming, self._arena.address), (self._outgoing, self._outgoing_address)):
            events += [Acquired(key, address + slot.offset) for key, slot in _served(pool)]
        events += [Acquired(key, int(self._views[key].ctypes.data), is_far=True) for key, _ in _served(self._lent)]
        return events

    def close(self) -> None:
        """Nothing is copied any more afterwards. Safe to call twice."""
        self._resources.close()

    def _pool_of(self, key: SlotKey) -> Pool:
        if key in self._views:
            return self._lent
        return self._incoming if isinstance(key.work, ReadKey) else self._outgoing


def _served(pool: Pool) -> Iterator[tuple[SlotKey, Slot]]:
    """The slots that a pool has for somebody now."""
    for slot in pool.grants():
        if isinstance(slot.key, SlotKey):
            yield slot.key, slot
