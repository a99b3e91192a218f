"""The staging memory of one agent: its slots, and the copies between slots and blocks.

Slots for incoming and for outgoing bytes are in separate halves: a target holds a slot until a source has filled it. If
sources could not get slots because of that, two engines could wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack

from kvferry.agent.memory.peer_slots import PeerSlots
from kvferry.errors import FerryError
from kvferry.session.commands import Acquire, Stage
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import ReadKey, SlotKey, incarnation_of
from kvferry.staging.mover import Mover
from kvferry.staging.pool import ENGINE_SHARE, Pool, Slot
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import View

StagingEvent = Acquired | Staged


class StagingSlots:
    """Only one thread uses it. `arena` is the staging memory, registered with the transports; `peer_slots` are attached
    slots of targets, into which `gathered_bytes` have been gathered."""

    def __init__(self, arena: Memory, mover: Mover, peer_slots: PeerSlots) -> None:
        half_bytes = arena.size_bytes // 2
        self._arena = arena
        # An engine that hangs keeps its slots: the rest is for others.
        most_bytes = ENGINE_SHARE * half_bytes
        self._incoming, self._outgoing = (
            Pool(half_bytes, most_bytes=most_bytes, share_of=incarnation_of) for _ in range(2)
        )
        # Gathers into slots of targets take turns like those into own slots: no target delays the copies of all others.
        self._attached = Pool(half_bytes)
        self._outgoing_address = arena.address + half_bytes
        self._mover, self._peer_slots = mover, peer_slots
        # A view keeps a slot mapped while a copy may touch it.
        self._views: dict[Hashable, View] = {}
        self.gathered_bytes = 0
        self._answers: list[Acquired] = []
        self._is_changed = False
        self._resources = ExitStack()
        self._resources.callback(self._views.clear)
        self._resources.callback(mover.close)

    @property
    def busy(self) -> bool:
        """Whether copies are in progress whose end only `poll` finds out."""
        return self._mover.busy and not self._mover.notifies

    @property
    def is_changed(self) -> bool:
        """Whether `poll` may have something at once: a slot was asked for, or given back."""
        return self._is_changed

    @property
    def num_slots(self) -> int:
        """Slots that are held or waited for, own ones and those of targets. May be read from any thread."""
        return sum(pool.num_held + pool.num_waiting for pool in (self._incoming, self._outgoing, self._attached))

    def acquire(self, command: Acquire) -> None:
        """Request a slot; peers take turns. Where the target's own slot is attached, that one is used."""
        self._is_changed = True
        key, num_bytes = command.key, command.num_bytes
        view = self._peer_slots.find(key.remote, command.peer_address, num_bytes)
        try:
            if view is None:
                self._pool_of(key).ask(key, key.remote, num_bytes)
            else:
                self._attached.ask(key, key.remote, min(num_bytes, self._attached.size_bytes))
                self._views[key] = view
        except FerryError as error:
            self._answers.append(Acquired(key, 0, str(error)))

    def release(self, key: SlotKey) -> None:
        """Release a slot, or withdraw the request for it."""
        self._is_changed = True
        pool = self._pool_of(key)
        self._views.pop(key, None)
        if key in pool:
            pool.release(key)

    def stage(self, command: Stage) -> None:
        """Start a gather or a scatter."""
        self._mover.start(command.key, command.tiles, self._views.get(command.key))

    def poll(self) -> list[StagingEvent]:
        """The slots that are granted now, and the copies that have ended."""
        self._peer_slots.poll()
        ended = self._mover.poll()
        events: list[StagingEvent] = [Staged(key, error) for key, error in ended if isinstance(key, SlotKey)]
        self.gathered_bytes += sum(self._views[key].size for key, error in ended if key in self._views and not error)
        if not self._is_changed:
            return events
        events += self._answers
        self._answers, self._is_changed = [], False
        for pool, address in ((self._incoming, self._arena.address), (self._outgoing, self._outgoing_address)):
            events += [Acquired(key, address + slot.offset) for key, slot in _granted(pool)]
        events += [
            Acquired(key, int(self._views[key].ctypes.data), is_peer_slot=True) for key, _ in _granted(self._attached)
        ]
        return events

    def close(self) -> None:
        """Stop all copies. Safe to call twice."""
        self._resources.close()

    def _pool_of(self, key: SlotKey) -> Pool:
        if key in self._views:
            return self._attached
        return self._incoming if isinstance(key.work, ReadKey) else self._outgoing


def _granted(pool: Pool) -> Iterator[tuple[SlotKey, Slot]]:
    """The slots that a pool grants now."""
    for slot in pool.grants():
        if isinstance(slot.key, SlotKey):
            yield slot.key, slot
