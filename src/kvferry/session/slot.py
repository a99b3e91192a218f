"""One slot of staging memory in use: filled from one side, emptied to the other, and ours until nothing touches it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.plan.programs.tiles import Tile
from kvferry.plan.slots.slot_plan import Slot
from kvferry.session.keys import SlotKey
from kvferry.session.state_machine import StateMachine, TransitionTable


class SlotState(StrEnum):
    WAITING = "waiting"
    FILLING = "filling"
    EMPTYING = "emptying"
    DRAINING = "draining"
    OVER = "over"


SLOT_TABLE: TransitionTable = {
    (SlotState.WAITING, "acquired"): SlotState.FILLING,
    (SlotState.FILLING, "filled"): SlotState.EMPTYING,
    (SlotState.EMPTYING, "emptied"): SlotState.OVER,
    (SlotState.WAITING, "fail"): SlotState.OVER,
    (SlotState.FILLING, "fail"): SlotState.DRAINING,
    (SlotState.EMPTYING, "fail"): SlotState.DRAINING,
    (SlotState.DRAINING, "ended"): SlotState.OVER,
}
"""A target fills by the wire and empties by a scatter; a source fills by a gather and empties by the wire."""


@dataclass(slots=True)
class SlotUse:
    """`address` is the slot's own, once it is ours; `peer_address` where the other side has its slot, at a source. With
    `is_peer_slot` the two lead to the same bytes, each in its own process: what is filled is emptied."""

    key: SlotKey
    slot: Slot
    machine: StateMachine
    last_sent: float = 0.0
    address: int = 0
    peer_address: int = 0
    is_peer_slot: bool = False
    was_emptying: bool = False

    @classmethod
    def started(cls, key: SlotKey, slot: Slot, peer_address: int = 0) -> SlotUse:
        """One that waits for its slot."""
        return cls(key, slot, StateMachine(f"slot {key}", SLOT_TABLE, SlotState.WAITING), peer_address=peer_address)

    @property
    def state(self) -> StrEnum:
        return self.machine.state

    def fail(self) -> bool:
        """What is under way has to end first; whether it is over already."""
        self.was_emptying = self.was_emptying or self.state is SlotState.EMPTYING
        if self.machine.allows("fail"):
            self.machine.move("fail")
        return self.state is SlotState.OVER

    @property
    def gather(self) -> tuple[Tile, ...]:
        """Out of our blocks, into the slot."""
        return tuple(tile.shifted(0, self.address) for tile in self.slot.gather)

    @property
    def scatter(self) -> tuple[Tile, ...]:
        """Out of the slot, into our blocks."""
        return tuple(tile.shifted(self.address, 0) for tile in self.slot.scatter)
