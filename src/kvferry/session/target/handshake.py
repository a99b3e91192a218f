"""Meeting source ranks: the two-step hello, then a connected transport; once per incarnation of a rank.

Where bytes are pulled, we connect to the source's memory. Where they are pushed, the source connects to ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.errors import TransferError
from kvferry.plan.description.layout import Layout, fingerprint
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.choice import TYPICAL_AGENTS, Costs
from kvferry.session.events import Command, Connect, Count, Knock, PeerConnected, PeerKey, Send, Timing
from kvferry.session.state import Machine, Table
from kvferry.session.target.read_strategy import NO_STAGING, StagingPolicy
from kvferry.wire.messages import (
    WIRE_VERSION,
    Hello,
    Message,
    Offer,
    OfferRequest,
    Party,
    Probe,
    Reached,
    Reason,
    Renew,
    TargetOffer,
    TransportOffer,
    Welcome,
)

NO_PROBE = Probe(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Ourselves:
    """Who this rank is, and the layouts of all ranks of its engine: the route depends on all of them.

    `digest` says how much of what has landed is compared with the source's own, `direction` who moves the bytes, and
    `staging` whether they may go through staging memory. For sources that write are `transports`, `probe` and
    `staging_descriptor`, which is what a process of this host needs to attach our staging memory, empty where none can.
    With `may_turn` a source to which reading turns out to be far slower than writing writes instead, and one that can
    write while we read writes a share.
    """

    party: Party
    product_version: str
    layouts: tuple[Layout, ...]
    digest: DigestPolicy = DigestPolicy.OFF
    direction: Direction = Direction.READ
    transports: tuple[TransportOffer, ...] = ()
    probe: Probe = NO_PROBE
    staging_descriptor: bytes = b""
    staging: StagingPolicy = NO_STAGING
    may_turn: bool = False


class PeerState(StrEnum):
    GREETED = "greeted"
    WELCOMED = "welcomed"
    CONNECTING = "connecting"
    READY = "ready"
    OFFERING = "offering"


PEER_TABLE: Table = {
    (PeerState.GREETED, "welcome"): PeerState.WELCOMED,
    (PeerState.WELCOMED, "offer"): PeerState.CONNECTING,
    (PeerState.CONNECTING, "connected"): PeerState.READY,
    (PeerState.READY, "to be written to"): PeerState.OFFERING,
    (PeerState.OFFERING, "connected"): PeerState.READY,
    (PeerState.OFFERING, "refused"): PeerState.READY,
}


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer that cannot be used, and why."""

    peer: PeerKey
    error: TransferError


Step = Command | Lost
"""What follows from an answer: a command, or that a peer is lost."""


class CanWrite(StrEnum):
    """Whether a source from which we read can write to our memory, as it must to pack or to write a share."""

    UNKNOWN = "unknown"
    YES = "yes"
    NO = "no"


@dataclass(slots=True)
class Peer:
    """One source rank as its target sees it. `deadline` is when the handshake must be over; with `is_excused` it has
    been told so although nothing is claimed from it."""

    key: PeerKey
    machine: Machine
    deadline: float
    last_heard: float
    last_sent: float
    direction: Direction
    num_ranks: int = 0
    fingerprint: str = ""
    offer: Offer | None = None
    transport: str = ""
    choice: str = ""
    costs: Costs = TYPICAL_AGENTS
    can_write: CanWrite = CanWrite.UNKNOWN
    is_turning: bool = False
    is_excused: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether its blocks can be reached through its staging memory only."""
        return self.offer is not None and self.offer.is_staged

    def is_told(self, reached: Reached) -> None:
        """What we expect of gathers into our slots is a guess until the source knows."""
        self.costs = replace(self.costs, gathers_far=self.costs.gathers_far and reached.reaches_staging)

    @property
    def ready(self) -> bool:
        """A transport works; claims may be sent."""
        return self.machine.state is PeerState.READY


class Handshakes:
    """All peers that have been met, or are being met. Late and repeated answers change nothing."""

    def __init__(self, ours: Ourselves, timing: Timing) -> None:
        self._ours = ours
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
        peer = Peer(key, machine, deadline, last_heard=now, last_sent=now, direction=self._ours.direction)
        self._peers[key] = peer
        yield from self._ask(peer)

    def forget(self, key: PeerKey) -> None:
        """The next `meet` begins anew. Unknown peers are fine."""
        self._peers.pop(key, None)

    def welcomed(self, peer: Peer, welcome: Welcome, now: float) -> Iterator[Step]:
        """First step done: ask for the layout. Whoever was at this address before is gone."""
        if wrong := _stranger(peer.key, welcome.party):
            yield Lost(peer.key, wrong)
            return
        if peer.machine.allows("welcome"):
            peer.machine.move("welcome")
            peer.num_ranks, peer.fingerprint, peer.last_sent = welcome.num_ranks, welcome.fingerprint, now
            yield from self._ask(peer)
        for other in self:
            if _is_replaced(other.key, peer.key):
                # This incarnation has answered, so that one is gone, and its memory need not be kept mapped.
                what = f"{other.key} has been replaced by {peer.key}"
                yield Lost(other.key, TransferError(Reason.PEER_LOST, what))

    def offered(self, peer: Peer, offer: Offer, now: float) -> Iterator[Step]:
        """Second step done: have a transport chosen, by us or by the source."""
        if not peer.machine.allows("offer"):
            # Repeated, or late: it answers a handshake that has been given up.
            return
        wrong = _stranger(peer.key, offer.party)
        if wrong is None and fingerprint(offer.layout) != peer.fingerprint:
            wrong = TransferError(Reason.MALFORMED, f"{peer.key} offers another layout than it has announced")
        if wrong is not None:
            yield Lost(peer.key, wrong)
            return
        peer.machine.move("offer")
        peer.offer, peer.last_sent = offer, now
        if peer.direction is Direction.READ:
            yield Connect(peer.key, offer)
        else:
            yield from self._ask(peer)

    def connected(self, peer: Peer, event: PeerConnected, now: float) -> bool:
        """Whether the peer has become ready by this."""
        if not peer.machine.allows("connected"):
            return False
        is_reached = peer.machine.state is PeerState.OFFERING or peer.direction is Direction.WRITE
        peer.can_write = CanWrite.YES if is_reached else peer.can_write
        if peer.machine.state is PeerState.CONNECTING:
            peer.transport, peer.choice = event.transport, event.choice
            is_near = event.costs.gathers_far and bool(self._ours.staging_descriptor)
            peer.costs = replace(event.costs, gathers_far=is_near)
            can_turn = self._ours.may_turn and peer.direction is Direction.READ and not peer.is_staged
            peer.is_turning = can_turn and event.is_slow
        elif peer.is_turning:
            peer.is_turning, peer.direction = False, Direction.WRITE
            peer.transport, peer.choice = event.transport, event.choice
        peer.machine.move("connected")
        peer.last_heard = now
        return True

    def offer_ourselves(self, peer: Peer, now: float) -> Iterator[Command]:
        """Have a source that we read from connect to our memory too, so that it can write to it."""
        peer.machine.move("to be written to")
        peer.deadline, peer.last_sent = now + self._timing.handshake_s, now
        yield from self._ask(peer)

    def excuse(self, peer: Peer) -> Iterator[Send]:
        """Tell a source that has nothing for us, once, that we have done with testing: it need not help any longer.
        Lost, this costs it some turns."""
        if not peer.is_excused:
            peer.is_excused = True
            yield Send(peer.key, Renew(self._ours.party, ()))

    def not_reached(self, peer: Peer) -> bool:
        """A source cannot connect to our memory; whether that is no reason to give it up."""
        if not peer.machine.allows("refused"):
            return False
        peer.machine.move("refused")
        peer.can_write, peer.is_turning = CanWrite.NO, False
        return True

    def repeat(self, peer: Peer, now: float) -> Iterator[Step]:
        """Ask again what has not been answered for a while, and look whether anybody is there: a busy peer may take its
        time, one whose process has ended need not be waited for. A handshake that takes too long is given up."""
        if now >= peer.deadline and self.not_reached(peer):
            yield Count("targets_not_reached", Reason.DEADLINE)
        elif now >= peer.deadline:
            what = f"no handshake with {peer.key} within {self._timing.handshake_s:g} s"
            hint = "is that engine running, and do both engines have the same --token-file?"
            yield Lost(peer.key, TransferError(Reason.DEADLINE, what, hint=hint))
        elif now - peer.last_sent >= self._timing.resend_s:
            peer.last_sent = now
            yield from self._ask(peer)
            yield Knock(peer.key)

    def _ask(self, peer: Peer) -> Iterator[Send]:
        """The question of the present state; none while we connect."""
        ours = self._ours
        questions: dict[StrEnum, Message] = {
            PeerState.GREETED: Hello(
                WIRE_VERSION, ours.product_version, ours.party, peer.key.engine_id, peer.key.epoch
            ),
            PeerState.WELCOMED: OfferRequest(ours.party),
        }
        offer = TargetOffer(ours.party, ours.layouts, ours.transports, ours.probe, self._staging_for(peer))
        questions[PeerState.OFFERING] = offer
        if peer.direction is Direction.WRITE:
            questions[PeerState.CONNECTING] = offer
        if question := questions.get(peer.machine.state):
            yield Send(peer.key, question)

    def _staging_for(self, peer: Peer) -> bytes:
        """Who copies what it posts need not post what it gathers: our slots are as near to it as its own."""
        return self._ours.staging_descriptor if peer.costs.gathers_far else b""


def _is_replaced(older: PeerKey, newer: PeerKey) -> bool:
    """Another start of the same engine, or another engine at the same address: some have a new id at every start."""
    restarted = older.engine_id == newer.engine_id and older.epoch != newer.epoch
    return restarted or (older.address == newer.address and older != newer)


def _stranger(key: PeerKey, party: Party) -> TransferError | None:
    """Who answers must be who was addressed."""
    if (party.engine_id, party.epoch) == (key.engine_id, key.epoch):
        return None
    found = f"{party.engine_id}#{party.epoch}"
    return TransferError(
        Reason.WRONG_ENGINE, f"another engine answers at {key.address}", found=found, expected=str(key)
    )
