"""Meeting source ranks: the two-step hello, then a connected transport; once per incarnation of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvferry.session.events import Connect, PeerKey, Send, Timing
from kvferry.session.machine import Machine, Table
from kvferry.wire.messages import WIRE_VERSION, Hello, Message, Offer, OfferRequest, Party, Welcome

__all__ = ["PEER_TABLE", "Handshakes", "Peer", "PeerState"]


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
    """One source rank as its target sees it. `deadline` is when the handshake must be over."""

    key: PeerKey
    machine: Machine
    deadline: float
    last_heard: float
    last_sent: float
    num_ranks: int = 0
    fingerprint: str = ""
    offer: Offer | None = None
    transport: str = ""
    choice: str = ""

    @property
    def ready(self) -> bool:
        """A transport works; claims may be sent."""
        return self.machine.state is PeerState.READY


class Handshakes:
    """All peers that have been met, or are being met. Late and repeated answers change nothing."""

    def __init__(self, ours: Party, product_version: str, timing: Timing) -> None:
        self._ours = ours
        self._product_version = product_version
        self._timing = timing
        self._peers: dict[PeerKey, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._peers

    def __getitem__(self, key: PeerKey) -> Peer:
        return self._peers[key]

    def meet(self, key: PeerKey, now: float) -> Iterator[Send]:
        """Greet a peer that is not known yet."""
        if key in self._peers:
            return
        machine = Machine(f"peer {key}", PEER_TABLE, PeerState.GREETED)
        deadline = now + self._timing.handshake_s
        peer = self._peers[key] = Peer(key, machine, deadline, last_heard=now, last_sent=now)
        yield from self._ask(peer)

    def forget(self, key: PeerKey) -> None:
        """The next `meet` begins anew. Unknown peers are fine."""
        self._peers.pop(key, None)

    def welcomed(self, peer: Peer, welcome: Welcome, now: float) -> Iterator[Send]:
        """First step done: ask for the layout."""
        if peer.machine.allows("welcome"):
            peer.machine.move("welcome")
            peer.num_ranks, peer.fingerprint, peer.last_sent = welcome.num_ranks, welcome.fingerprint, now
            yield from self._ask(peer)

    def offered(self, peer: Peer, offer: Offer) -> Iterator[Connect]:
        """Second step done: have a transport chosen."""
        if peer.machine.allows("offer"):
            peer.machine.move("offer")
            peer.offer = offer
            yield Connect(peer.key, offer)

    def connected(self, peer: Peer, transport: str, choice: str, now: float) -> bool:
        """Whether the peer has become ready by this."""
        if not peer.machine.allows("connected"):
            return False
        peer.machine.move("connected")
        peer.transport, peer.choice, peer.last_heard = transport, choice, now
        return True

    def repeat(self, peer: Peer, now: float) -> Iterator[Send]:
        """Ask again what has not been answered for a while."""
        if not peer.ready and now - peer.last_sent >= self._timing.resend_s:
            peer.last_sent = now
            yield from self._ask(peer)

    def _ask(self, peer: Peer) -> Iterator[Send]:
        """The question of the present state; none while the transport connects."""
        questions: dict[StrEnum, Message] = {
            PeerState.GREETED: Hello(
                WIRE_VERSION, self._product_version, self._ours, peer.key.engine_id, peer.key.epoch
            ),
            PeerState.WELCOMED: OfferRequest(self._ours),
        }
        if question := questions.get(peer.machine.state):
            yield Send(peer.key, question)
