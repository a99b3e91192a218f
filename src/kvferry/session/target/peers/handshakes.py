"""Handshakes with source ranks: `Hello`, `OfferRequest`, then a connected transport; once per incarnation of a rank.

To read, we connect to the source's memory. To have it write, the source connects to ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from msgspec import structs

from kvferry.errors import TransferError
from kvferry.plan.description.layout import Layout, fingerprint, sharing_parts
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import CheckLiveness, Command, Connect, Count, Send
from kvferry.session.events import PeerConnected, PeerUnreachable
from kvferry.session.keys import PeerKey
from kvferry.session.state_machine import StateMachine
from kvferry.session.target.peers.peer import PEER_TABLE, CanWrite, Peer, PeerState
from kvferry.session.target.read_strategy import NO_STAGING, StagingPolicy
from kvferry.session.timing import Timing
from kvferry.wire import messages as m
from kvferry.wire.messages import Party, Reason

NO_PROBE = m.Probe(0, 0, 0)


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Who this rank is, and the layouts of all ranks of its engine: the route depends on all of them.

    `digest` says how much of what has landed is compared with the source's own, `direction` who moves the bytes, and
    `staging` whether they may go through staging memory. `transports`, `probe` and `staging_descriptor` are for sources
    that write; the last is what a process of this host needs to attach this rank's staging memory, empty where none
    can. With `may_switch_direction` a source writes instead where reading from it is far slower, and one that can write
    while this rank reads writes a share. Without `may_leave_host` nobody on another host is asked. By the
    transports named `revocable` a source has access of its own, which can be taken from it.
    """

    party: m.Party
    product_version: str
    layouts: tuple[Layout, ...]
    digest: DigestPolicy = DigestPolicy.OFF
    direction: Direction = Direction.READ
    transports: tuple[m.TransportOffer, ...] = ()
    probe: m.Probe = NO_PROBE
    staging_descriptor: bytes = b""
    staging: StagingPolicy = NO_STAGING
    may_switch_direction: bool = False
    may_leave_host: bool = True
    revocable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer that cannot be used, and why."""

    peer: PeerKey
    error: TransferError


@dataclass(frozen=True, slots=True)
class PeerReady:
    """A peer that is ready: fetches that wait can claim from it now."""

    peer: PeerKey


Step = Command | PeerLost | PeerReady
"""What follows from an answer."""


class Handshakes:
    """All peers with which a handshake is done or under way. Late and repeated answers change nothing."""

    def __init__(self, ours: TargetIdentity, timing: Timing) -> None:
        self._ours = ours
        self._timing = timing
        self._numbers = count()
        self._peers: dict[PeerKey, Peer] = {}
        # The peers whose handshake is not over, and some that have just become ready: few of a thousand.
        self._meeting: dict[PeerKey, Peer] = {}
        # Sources whose access was revoked and that have not acknowledged what they were told to abort. Their older
        # claims must not be carried out by the access that they get now.
        self.withheld: frozenset[Party] = frozenset()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._peers

    def __getitem__(self, key: PeerKey) -> Peer:
        return self._peers[key]

    @property
    def meeting(self) -> tuple[Peer, ...]:
        """The peers that are not ready."""
        self._meeting = {key: peer for key, peer in self._meeting.items() if not peer.ready}
        return tuple(self._meeting.values())

    def greet(self, key: PeerKey, now: float) -> Iterator[Send]:
        """Begin the handshake with a peer that is not known yet."""
        if key in self._peers:
            return
        machine = StateMachine(f"peer {key}", PEER_TABLE, PeerState.GREETED)
        deadline = now + self._timing.handshake_s
        peer = Peer(key, machine, deadline, last_heard=now, last_sent=now, direction=self._ours.direction)
        self._peers[key] = self._meeting[key] = peer
        yield from self._ask(peer)

    def forget(self, key: PeerKey) -> None:
        """Forget a peer: the next `greet` begins a new handshake. Unknown peers are ignored."""
        self._peers.pop(key, None)
        self._meeting.pop(key, None)

    def welcomed(self, peer: Peer, welcome: m.Welcome, now: float) -> Iterator[Step]:
        """The first step is done: ask for the layout. An earlier incarnation at this address has ended."""
        if wrong := _identity_error(peer.key, welcome.party):
            yield PeerLost(peer.key, wrong)
            return
        if peer.machine.allows("welcome"):
            peer.machine.move("welcome")
            peer.num_ranks, peer.fingerprint, peer.last_sent = welcome.num_ranks, welcome.fingerprint, now
            yield from self._ask(peer)
        for other in self:
            if _is_replaced(other.key, peer.key):
                # This incarnation has answered, so the other one has ended, and its memory need not be kept mapped.
                what = f"{other.key} has been replaced by {peer.key}"
                yield PeerLost(other.key, TransferError(Reason.PEER_LOST, what))

    def offered(self, peer: Peer, offer: m.Offer, now: float) -> Iterator[Step]:
        """The second step is done: we or the source choose a transport."""
        if not peer.machine.allows("offer"):
            # It is repeated, or it answers a handshake that has been given up.
            return
        wrong = _identity_error(peer.key, offer.party)
        if wrong is None and fingerprint(offer.layout) != peer.fingerprint:
            wrong = TransferError(Reason.MALFORMED, f"{peer.key} offers another layout than it has announced")
        if wrong is not None:
            yield PeerLost(peer.key, wrong)
            return
        peer.machine.move("offer")
        peer.handshake = next(self._numbers)
        peer.offer, peer.last_sent = structs.replace(offer, layout=sharing_parts(offer.layout)), now
        if peer.direction is Direction.READ:
            # Our own tests end by themselves, but first come those of other peers.
            peer.deadline = now + self._timing.handshake_s + self._timing.transfer_s
            yield Connect(peer.key, offer)
        else:
            yield from self._ask(peer)

    def reached(self, peer: Peer, reached: m.Reached, now: float) -> Iterator[Step]:
        """The source is connected to our memory; it also says whether it can attach our staging memory. What it says
        of an earlier handshake may be void."""
        if reached.handshake != peer.handshake:
            return
        peer.note_reached(reached, self._ours.revocable)
        if peer.direction is Direction.WRITE or peer.machine.state is PeerState.OFFERING:
            yield from self.connected(PeerConnected(peer.key, reached.transport, reached.choice), now)
        elif peer.can_write is CanWrite.NO:
            # Its tests took longer than we have waited.
            peer.can_write = CanWrite.YES

    def connected(self, event: PeerConnected, now: float) -> Iterator[Step]:
        """A transport works, in one direction or in both."""
        peer = self._peers.get(event.peer) if isinstance(event.peer, PeerKey) else None
        if peer is None or not peer.machine.allows("connected"):
            return
        is_reached = peer.machine.state is PeerState.OFFERING or peer.direction is Direction.WRITE
        peer.can_write = CanWrite.YES if is_reached else peer.can_write
        if peer.machine.state is PeerState.CONNECTING:
            peer.transport, peer.choice = event.transport, event.choice
            is_near = event.costs.gathers_into_peer and bool(self._ours.staging_descriptor)
            peer.costs = replace(event.costs, gathers_into_peer=is_near)
            can_switch = self._ours.may_switch_direction and peer.direction is Direction.READ and not peer.is_staged
            peer.is_switching_direction = can_switch and event.is_slow
        elif peer.is_switching_direction:
            peer.is_switching_direction, peer.direction = False, Direction.WRITE
            peer.transport, peer.choice = event.transport, event.choice
        peer.machine.move("connected")
        peer.last_heard = now
        if peer.is_switching_direction:
            yield from self.offer_memory(peer, now)
        else:
            yield PeerReady(peer.key)

    def unreachable(self, event: PeerUnreachable, now: float) -> Iterator[Step]:
        """No transport works."""
        if isinstance(event.peer, PeerKey):
            what, hint = "no transport reaches the source", "start both engines with --transport tcp"
            yield PeerLost(event.peer, TransferError(Reason.UNREACHABLE, what, found=event.error, hint=hint))

    def offer_memory(self, peer: Peer, now: float) -> Iterator[Command]:
        """Have a source that we read from connect to our memory too, so that it can write to it."""
        peer.machine.move("to be written to")
        self._meeting[peer.key] = peer
        peer.deadline, peer.last_sent = now + self._timing.handshake_s, now
        yield from self._ask(peer)

    def tell_unneeded(self, peer: Peer) -> Iterator[Send]:
        """Tell a source that has nothing for us, once, that our self-test is over. If this message is lost, the source
        serves the test for as long as a handshake may take."""
        if not peer.is_told_unneeded:
            peer.is_told_unneeded = True
            yield Send(peer.key, m.Renew(self._ours.party, ()))

    def not_reached(self, peer: Peer, reason: Reason, now: float) -> Iterator[Step]:
        """A source that we read from cannot connect to our memory: it is used nevertheless."""
        peer.machine.move("refused")
        peer.can_write, peer.not_reached_at, peer.is_switching_direction = CanWrite.NO, now, False
        yield Count("targets_not_reached", reason)
        yield PeerReady(peer.key)

    def admit(self, withheld: frozenset[Party], now: float) -> Iterator[Send]:
        """Only these are withheld now: offer our memory to those that waited for it, as if for the first time."""
        admitted, self.withheld = self.withheld - withheld, withheld
        for peer in self.meeting if admitted else ():
            if peer.source in admitted:
                peer.deadline, peer.last_sent = now + self._timing.handshake_s, now
                yield from self._ask(peer)

    def known_as(self, source: Party) -> list[PeerKey]:
        """Every address at which a source is known."""
        return [key for key, peer in self._peers.items() if peer.source == source]

    def repeat(self, peer: Peer, now: float) -> Iterator[Step]:
        """Repeat a question that has not been answered for a while, and check whether the peer is alive: a busy peer
        may answer later, one whose process has ended never will. A handshake that takes too long is given up."""
        if now >= peer.deadline and peer.machine.allows("refused"):
            yield from self.not_reached(peer, Reason.DEADLINE, now)
        elif now >= peer.deadline:
            yield PeerLost(peer.key, self._too_late(peer))
        elif now - peer.last_sent >= self._timing.resend_s:
            peer.last_sent = now
            yield from self._ask(peer)
            yield CheckLiveness(peer.key)

    def _too_late(self, peer: Peer) -> TransferError:
        if peer.machine.state is PeerState.CONNECTING and peer.direction is Direction.READ:
            limit_s = self._timing.handshake_s + self._timing.transfer_s
            what = f"our tests of the transports to {peer.key} have not ended within {limit_s:g} s"
            return TransferError(Reason.DEADLINE, what, hint="is one of the two hosts overloaded?")
        what = f"no handshake with {peer.key} within {self._timing.handshake_s:g} s"
        return TransferError(Reason.DEADLINE, what, hint="is that engine running, or overloaded?")

    def _ask(self, peer: Peer) -> Iterator[Send]:
        """The question of the present state; none while we connect."""
        ours, state = self._ours, peer.machine.state
        if state is PeerState.GREETED:
            hello = m.Hello(m.WIRE_VERSION, ours.product_version, ours.party, peer.key.engine_id, peer.key.epoch)
            yield Send(peer.key, hello)
        elif state is PeerState.WELCOMED:
            yield Send(peer.key, m.OfferRequest(ours.party))
        elif state is PeerState.OFFERING or (state is PeerState.CONNECTING and peer.direction is Direction.WRITE):
            yield from self._offer(peer)

    def _offer(self, peer: Peer) -> Iterator[Send]:
        """Our memory, unless it is withheld from the source for now."""
        if peer.source in self.withheld:
            return
        # A source whose transport copies with its own processors can gather into our slots just as well.
        staging = self._ours.staging_descriptor if peer.costs.gathers_into_peer else b""
        memory = self._ours.transports, self._ours.probe, staging
        offer = m.TargetOffer(self._ours.party, self._ours.layouts, *memory, peer.handshake)
        yield Send(peer.key, offer, access=peer.source)


def _is_replaced(older: PeerKey, newer: PeerKey) -> bool:
    """Whether `newer` is a new start of the same engine, or has its address: some have a new id at every start."""
    restarted = older.engine_id == newer.engine_id and older.epoch != newer.epoch
    return restarted or (older.address == newer.address and older != newer)


def _identity_error(key: PeerKey, party: m.Party) -> TransferError | None:
    """Why an answer is not from whom we addressed; None when it is."""
    if (party.engine_id, party.epoch) == (key.engine_id, key.epoch):
        return None
    found = f"{party.engine_id}#{party.epoch}"
    return TransferError(
        Reason.WRONG_ENGINE, f"another engine answers at {key.address}", found=found, expected=str(key)
    )
