"""One source rank as its target sees it: how far the handshake with it is, and what is known of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.calibration import TYPICAL_AGENTS, Costs
from kvferry.session.keys import PeerKey
from kvferry.session.state_machine import StateMachine, TransitionTable
from kvferry.wire.messages import Offer, Party, Reached


class PeerState(StrEnum):
    GREETED = "greeted"
    WELCOMED = "welcomed"
    CONNECTING = "connecting"
    READY = "ready"
    OFFERING = "offering"


PEER_TABLE: TransitionTable = {
    (PeerState.GREETED, "welcome"): PeerState.WELCOMED,
    (PeerState.WELCOMED, "offer"): PeerState.CONNECTING,
    (PeerState.CONNECTING, "connected"): PeerState.READY,
    (PeerState.READY, "to be written to"): PeerState.OFFERING,
    (PeerState.OFFERING, "connected"): PeerState.READY,
    (PeerState.OFFERING, "refused"): PeerState.READY,
}


class CanWrite(StrEnum):
    """Whether a source from which we read can write to our memory, as it must to pack or to write a share."""

    UNKNOWN = "unknown"
    YES = "yes"
    NO = "no"


@dataclass(slots=True)
class Peer:
    """One source rank as its target sees it. The handshake must be over by the `deadline`; `handshake` is its number
    among those of all sources, once the source has offered its memory. With `is_told_unneeded` the source has been told
    that it is over although nothing is claimed from it. At `not_reached_at` it could last not connect to our memory.
    Where it `is_revocable`, what it writes to our memory is written by access of its own."""

    key: PeerKey
    machine: StateMachine
    deadline: float
    last_heard: float
    last_sent: float
    direction: Direction
    num_ranks: int = 0
    fingerprint: str = ""
    offer: Offer | None = None
    handshake: int = -1
    transport: str = ""
    choice: str = ""
    costs: Costs = TYPICAL_AGENTS
    can_write: CanWrite = CanWrite.UNKNOWN
    not_reached_at: float = float("-inf")
    is_revocable: bool = False
    is_switching_direction: bool = False
    is_told_unneeded: bool = False
    # Since the last one that was valid.
    num_failed_reads: int = 0
    last_failed: float = float("-inf")

    @property
    def is_staged(self) -> bool:
        """Whether its blocks can be reached through its staging memory only."""
        return self.offer is not None and self.offer.is_staged

    @property
    def source(self) -> Party | None:
        """Who it is, whatever address it was met at; None before it has said so."""
        return self.offer.party if self.offer is not None else None

    @property
    def access(self) -> Party | None:
        """Whose access it writes by, where that can be revoked."""
        return self.source if self.is_revocable else None

    def note_reached(self, reached: Reached, revocable: Collection[str]) -> None:
        """Only the source knows over what it writes, and whether it can gather into our slots, which nobody can keep it
        from."""
        self.is_revocable = reached.transport in revocable and not reached.reaches_staging
        self.costs = replace(self.costs, gathers_into_peer=self.costs.gathers_into_peer and reached.reaches_staging)

    @property
    def ready(self) -> bool:
        """A transport works; claims may be sent."""
        return self.machine.state is PeerState.READY
