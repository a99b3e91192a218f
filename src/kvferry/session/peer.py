"""One source rank as its target sees it: the two-step hello, then a connected transport."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.session.events import PeerKey
from kvferry.session.machine import Machine, Table
from kvferry.wire.messages import WIRE_VERSION, Hello, Message, Offer, OfferRequest, Party

__all__ = ["PEER_TABLE", "Peer", "PeerState"]


class PeerState(StrEnum):
    GREETED = "greeted"
    WELCOMED = "welcomed"
    CONNECTING = "connecting"
    READY = "ready"


PEER_TABLE: Table = {
    (PeerState.GREETED, "welcome"): PeerState.WELCOMED,
    (PeerState.WELCOMED, "offer"): PeerState.CONNECTING,
    (PeerState.CONNECTING, "connected"): PeerState.READY,
}


@dataclass(slots=True)
class Peer:
    """Handshake state of one peer; `deadline` is when the handshake must be over."""

    key: PeerKey
    machine: Machine
    deadline: float
    last_heard: float
    last_sent: float
    num_ranks: int = 0
    offer: Offer | None = None
    transport: str = ""
    choice: str = ""

    @classmethod
    def greeted(cls, key: PeerKey, now: float, handshake_s: float) -> Peer:
        """A peer to which `Hello` has just been sent."""
        machine = Machine(f"peer {key}", PEER_TABLE, PeerState.GREETED)
        return cls(key, machine, deadline=now + handshake_s, last_heard=now, last_sent=now)

    @property
    def ready(self) -> bool:
        """A transport works; claims may be sent."""
        return self.machine.state is PeerState.READY

    def question(self, ours: Party, product_version: str) -> tuple[Message, ...]:
        """What has to be asked (again) in the present state: one message, or none while the transport connects."""
        if self.machine.state is PeerState.GREETED:
            return (Hello(WIRE_VERSION, product_version, ours, self.key.engine_id, self.key.epoch),)
        if self.machine.state is PeerState.WELCOMED:
            return (OfferRequest(ours),)
        return ()
