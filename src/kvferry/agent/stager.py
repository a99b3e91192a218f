"""The staging memory of one agent: who has which slot of it, and what is copied between slots and blocks.

Slots for what comes in and slots for what goes out are apart: a target's slot is held until a source has filled it, and
if sources could not get slots of their own because of that, two engines could wait for each other for ever.
"""

from __future__ import annotations

from contextlib import ExitStack

from kvferry.errors import FerryError
from kvferry.session.events import Acquire, Acquired, ReadKey, SlotKey, Stage, Staged
from kvferry.staging.mover import Mover
from kvferry.staging.pool import Pool
from kvferry.transport.base import Memory

__all__ = ["Stager"]

StagerEvent = Acquired | Staged


class Stager:
    """Belongs to one thread. `arena` is the staging memory, registered with the transports already."""

    def __init__(self, arena: Memory, mover: Mover) -> None:
        half_bytes = arena.size_bytes // 2
        self._arena = arena
        self._incoming, self._outgoing = Pool(half_bytes), Pool(half_bytes)
        self._outgoing_address = arena.address + half_bytes
        self._mover = mover
        self._refused: list[Acquired] = []
        self._is_changed = False
        self._resources = ExitStack()
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
        """Slots that are held or waited for. May be asked from any thread."""
        return sum(pool.num_held + pool.num_waiting for pool in (self._incoming, self._outgoing))

    def acquire(self, command: Acquire) -> None:
        """Get in line; peers take turns."""
        self._is_changed = True
        try:
            self._pool_of(command.key).ask(command.key, command.key.remote, command.num_bytes)
        except FerryError as error:
            self._refused.append(Acquired(command.key, 0, str(error)))

    def release(self, key: SlotKey) -> None:
        """Give back, or leave the line."""
        self._is_changed = True
        if key in self._pool_of(key):
            self._pool_of(key).release(key)

    def stage(self, command: Stage) -> None:
        """Gather or scatter."""
        self._mover.start(command.key, command.tiles)

    def poll(self) -> list[StagerEvent]:
        """The slots that are served now, and the copies that have ended."""
        ended = self._mover.poll()
        events: list[StagerEvent] = [Staged(key, error) for key, error in ended if isinstance(key, SlotKey)]
        if not self._is_changed:
            return events
        events += self._refused
        self._refused, self._is_changed = [], False
        pools = ((self._incoming, self._arena.address), (self._outgoing, self._outgoing_address))
        for pool, address in pools:
            events += [
                Acquired(slot.key, address + slot.offset) for slot in pool.grants() if isinstance(slot.key, SlotKey)
            ]
        return events

    def close(self) -> None:
        """Nothing is copied any more afterwards. Safe to call twice."""
        self._resources.close()

    def _pool_of(self, key: SlotKey) -> Pool:
        return self._incoming if isinstance(key.work, ReadKey) else self._outgoing
