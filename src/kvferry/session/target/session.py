"""The target side: fetch a request's cache from every source rank that holds a part, and decode only what is valid.

A fetch has these phases: handshake with the peers (once per incarnation), claim, transfer, `Landed`, `Valid`. Who moves
the bytes, we or the source, is a property of the read; it decides who says that the ticket has ended. Whatever goes
wrong ends the fetch with one typed error, and its blocks stay in quarantine until no ticket can write to them any
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import CheckLiveness, Command, Count, Disconnect
from kvferry.session.events import (
    AbortRequest,
    Acquired,
    AnswerArrived,
    Digested,
    FetchRequest,
    HoldRequest,
    PeerConnected,
    PeerGone,
    PeerUnreachable,
    Staged,
    Tick,
    TicketEnded,
)
from kvferry.session.keys import PeerKey, ReadKey, SlotKey, peers_of
from kvferry.session.target.heartbeats import Heartbeats
from kvferry.session.target.peers.handshakes import Handshakes, PeerLost
from kvferry.session.target.peers.identity import TargetIdentity
from kvferry.session.target.peers.peer import Peer, PeerState
from kvferry.session.target.pending_aborts import PendingAborts
from kvferry.session.target.quarantine import Quarantine
from kvferry.session.target.queued_leases import QueuedLeases
from kvferry.session.target.reads.fetch import WAITING, Fetch, FetchBroken, ReadState, Step
from kvferry.session.target.reads.lifecycle import Reads
from kvferry.session.timeouts import Timing
from kvferry.wire.messages import (
    Aborted,
    Grant,
    Offer,
    Packed,
    Queued,
    Reached,
    Reason,
    Refusal,
    Renewed,
    Valid,
    Welcome,
    Written,
)

# Each is answered: after two of them without an answer it is checked whether the source's process has ended.
QUIET_HEARTBEATS = 2

TargetEvent = (
    HoldRequest
    | FetchRequest
    | AbortRequest
    | AnswerArrived
    | PeerConnected
    | PeerUnreachable
    | PeerGone
    | TicketEnded
    | Acquired
    | Staged
    | Digested
    | Tick
)


class TargetSession:
    """Fetches of one rank. Give it every event, and carry out the commands that it returns."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        self._timing = timing
        self._peers = Handshakes(identity, timing)
        self._fetches: dict[str, Fetch] = {}
        self._reads = Reads(identity, self._peers, self._fetches, timing)
        self._aborts = PendingAborts(identity.party, self._peers, timing)
        self._queued = QueuedLeases(timing.hold_s)
        self._heartbeats = Heartbeats(identity.party, self._peers, self._fetches, self._queued, timing)
        self._quarantine = Quarantine(self._fetches, self._aborts, self._peers)
        self._handlers: dict[type, Callable[..., Iterator[Step | PeerLost]]] = {
            HoldRequest: self._hold,
            FetchRequest: self._fetch,
            AbortRequest: self._abort,
            AnswerArrived: self._answer,
            PeerConnected: self._connected,
            PeerUnreachable: self._unreachable,
            PeerGone: self._gone,
            TicketEnded: self._ticket_ended,
            Acquired: self._reads.staged.acquired,
            Staged: self._staged,
            Digested: self._reads.digested,
            Tick: self._tick,
        }
        self._answers: dict[type, Callable[..., Iterator[Step | PeerLost]]] = {
            Welcome: self._peers.welcomed,
            Offer: self._peers.offered,
            Reached: self._reached,
            Grant: self._reads.grant,
            Packed: self._packed,
            Queued: self._reads.queued,
            Written: self._reads.written,
            Valid: self._reads.valid,
            Renewed: self._renewed,
            Refusal: self._refused,
        }

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`."""
        return list(self._follow(self._handlers[type(event)](event, now), now))

    def next_deadline(self, now: float) -> float:
        """When `handle(Tick())` is due next; infinity when nothing is waited for."""
        if self._fetches or self._queued or self._aborts or not all(peer.ready for peer in self._peers):
            return now + min(self._timing.heartbeat_s, self._timing.resend_s) / 2
        return min((peer.last_heard + self._timing.idle_peer_s for peer in self._peers), default=float("inf"))

    def num_open(self) -> int:
        """Fetches that are not over, quarantined ones included."""
        return len(self._fetches)

    def may_be_written(self) -> bool:
        """Whether a peer may be accessing our memory: it writes, or tests how it could."""
        testing = any(
            not peer.ready and (peer.direction is Direction.WRITE or peer.machine.state is PeerState.OFFERING)
            for peer in self._peers
        )
        return testing or any(read.is_exposed for fetch in self._fetches.values() for read in fetch.reads.values())

    def written_ids(self) -> frozenset[str]:
        """Requests to whose blocks a source may be writing, for all we know. Staging memory is nobody's block."""
        return frozenset(
            fetch.wanted.request_id
            for fetch in self._fetches.values()
            if any(read.is_exposed and not read.strategy.is_staged for read in fetch.reads.values())
        )

    def _follow(self, steps: Iterator[Step | PeerLost], now: float) -> Iterator[Command]:
        """Handle lost peers and broken fetches at once, before the steps that follow."""
        for step in steps:
            if isinstance(step, PeerLost):
                yield from self._lose(step.peer, step.error, now)
            elif isinstance(step, FetchBroken):
                yield from self._quarantine.fail(step.fetch, step.error, now)
            else:
                yield step

    def _lose(self, key: PeerKey, error: TransferError, now: float) -> Iterator[Command]:
        """Forget a peer and fail everything that depends on it. The next fetch begins a new handshake."""
        self._peers.forget(key)
        self._reads.bindings.forget(key)
        for fetch in list(self._fetches.values()):
            if key in fetch.peers and not fetch.failed:
                yield from self._quarantine.fail(fetch, error, now)
        yield Disconnect(key)

    # --- the engine's side ---

    def _hold(self, event: HoldRequest, now: float) -> Iterator[Step | PeerLost]:
        self._queued.add(event, now)
        for key in peers_of(event.reference, event.addresses):
            yield from self._peers.greet(key, now)

    def _fetch(self, event: FetchRequest, now: float) -> Iterator[Step | PeerLost]:
        self._queued.end(event.reference)
        peers = peers_of(event.reference, event.addresses)
        fetch = Fetch(event, peers, began=now)
        self._fetches[event.claim_id] = fetch
        for key in peers:
            yield from self._peers.greet(key, now)
        yield from self._reads.claim_when_ready(fetch, now)

    def _abort(self, event: AbortRequest, now: float) -> Iterator[Step | PeerLost]:
        for fetch in list(self._fetches.values()):
            if fetch.wanted.request_id == event.request_id and not fetch.failed:
                yield FetchBroken(fetch, TransferError(Reason.ABORTED, "the request was aborted"))

    # --- meeting peers ---

    def _reached(self, peer: Peer, reached: Reached, now: float) -> Iterator[Step | PeerLost]:
        """The source is connected to our memory; it also says whether it can attach our staging memory."""
        peer.note_reached(reached)
        if peer.direction is Direction.WRITE:
            yield from self._connected(PeerConnected(peer.key, reached.transport, reached.choice), now)
        elif peer.machine.state is PeerState.OFFERING:
            event = PeerConnected(peer.key, peer.transport, peer.choice)
            if peer.is_turning:
                event = PeerConnected(peer.key, reached.transport, reached.choice)
            yield from self._connected(event, now)

    def _connected(self, event: PeerConnected, now: float) -> Iterator[Step | PeerLost]:
        if not isinstance(event.peer, PeerKey) or event.peer not in self._peers:
            return
        peer = self._peers[event.peer]
        if not self._peers.connected(peer, event, now):
            return
        if peer.is_turning:
            yield from self._peers.offer_memory(peer, now)
        else:
            yield from self._claim_what_waits(event.peer, now)

    def _claim_what_waits(self, key: PeerKey, now: float) -> Iterator[Step | PeerLost]:
        for fetch in [fetch for fetch in self._fetches.values() if key in fetch.peers]:
            yield from self._reads.claim_when_ready(fetch, now)

    def _unreachable(self, event: PeerUnreachable, now: float) -> Iterator[Step | PeerLost]:
        if not isinstance(event.peer, PeerKey):
            return
        error = TransferError(
            Reason.UNREACHABLE,
            "no transport reaches the source",
            found=event.error,
            hint="start both engines with --transport tcp",
        )
        yield PeerLost(event.peer, error)

    # --- reading ---

    def _packed(self, peer: Peer, packed: Packed, now: float) -> Iterator[Step | PeerLost]:
        yield from self._reads.packed(peer, packed, now)
        yield from self._quarantine.drained(ReadKey(packed.claim_id, peer.key))

    def _ticket_ended(self, event: TicketEnded, now: float) -> Iterator[Step | PeerLost]:
        key = event.key
        if isinstance(key, SlotKey):
            yield from self._reads.staged.filled(key, event.error, now)
            yield from self._quarantine.drained(key.work)
            return
        fetch = self._fetches.get(key.claim_id) if isinstance(key, ReadKey) else None
        if fetch is None or not isinstance(key, ReadKey) or key.peer not in fetch.reads:
            return
        fetch.reads[key.peer].ended(Direction.READ)
        if fetch.failed:
            yield from self._quarantine.free_when_drained(fetch)
        else:
            yield from self._reads.ticket_ended(fetch, key.peer, event.error, now)

    def _staged(self, event: Staged, now: float) -> Iterator[Step | PeerLost]:
        yield from self._reads.staged.staged(event, now)
        yield from self._quarantine.drained(event.key.work)

    # --- failing ---

    def _gone(self, event: PeerGone, now: float) -> Iterator[Step | PeerLost]:
        if event.peer in self._peers and (not self._peers[event.peer].ready or self._reads.wait_for(event.peer)):
            what, hint = f"nothing listens at {event.peer.address} any more", "has that engine exited?"
            yield PeerLost(event.peer, TransferError(Reason.PEER_LOST, what, hint=hint))
        # This covers what has just failed, too: no acknowledgement of this process can come.
        self._aborts.gone(event.peer, now)

    # --- answers ---

    def _answer(self, event: AnswerArrived, now: float) -> Iterator[Step | PeerLost]:
        handler = self._answers.get(type(event.message))
        if isinstance(event.message, Aborted):
            # A peer that counts as lost may have resumed: its acknowledgement counts as well.
            self._aborts.acknowledged(event.peer, event.message, now)
            yield from self._quarantine.end_acknowledged(now)
        elif handler is None:
            yield Count("unexpected_messages", type(event.message).__name__)
            return
        if event.peer in self._peers:
            peer = self._peers[event.peer]
            peer.last_heard = now
            yield from handler(peer, event.message, now) if handler else ()

    def _refused(self, peer: Peer, refusal: Refusal, now: float) -> Iterator[Step | PeerLost]:
        error = TransferError(
            refusal.reason, f"the source refused: {refusal.what}", found=refusal.found, expected=refusal.expected
        )
        if not refusal.claim_id and refusal.reason == Reason.UNREACHABLE and self._peers.not_reached(peer):
            yield Count("targets_not_reached", refusal.reason)
            yield from self._claim_what_waits(peer.key, now)
            return
        if not refusal.claim_id:
            yield PeerLost(peer.key, error)
            return
        for fetch, _ in self._reads.of(peer.key, refusal.claim_id, *WAITING):
            yield FetchBroken(fetch, error)

    def _renewed(self, peer: Peer, renewed: Renewed, now: float) -> Iterator[Step | PeerLost]:
        error = TransferError(Reason.EXPIRED, "the lease expired before the transfer was complete")
        for fetch in list(self._fetches.values()):
            reading = peer.key in fetch.reads and fetch.reads[peer.key].state is ReadState.MOVING
            if reading and fetch.wanted.reference.lease_id in renewed.gone:
                yield FetchBroken(fetch, error)

    # --- time ---

    def _tick(self, event: Tick, now: float) -> Iterator[Step | PeerLost]:
        for peer in self._peers:
            yield from self._watch(peer, now)
        for fetch in list(self._fetches.values()):
            yield from self._reads.retry(fetch, now)
        yield from self._quarantine.end_acknowledged(now)
        yield from self._aborts.repeat(now)
        self._queued.expire(now)
        yield from self._heartbeats.send(now)

    def _watch(self, peer: Peer, now: float) -> Iterator[Step | PeerLost]:
        """Repeat an unanswered question of the handshake; give a peer up that stays silent while it is needed, sooner
        when nobody listens there any more."""
        if not peer.ready:
            yield from self._peers.repeat(peer, now)
            if peer.ready:
                yield from self._claim_what_waits(peer.key, now)
            return
        silent_s = now - peer.last_heard if self._reads.wait_for(peer.key) else 0.0
        if silent_s > QUIET_HEARTBEATS * self._timing.heartbeat_s and now - peer.last_sent >= self._timing.resend_s:
            peer.last_sent = now
            yield CheckLiveness(peer.key)
        if silent_s > self._timing.silence_s:
            what = f"{peer.key} has not answered for {self._timing.silence_s:g} s"
            yield PeerLost(peer.key, TransferError(Reason.PEER_LOST, what))
        elif now >= peer.last_heard + self._timing.idle_peer_s and not self._is_needed(peer):
            # It may be gone for good; if not, the next fetch begins a new handshake.
            yield PeerLost(peer.key, TransferError(Reason.PEER_LOST, f"{peer.key} was idle"))

    def _is_needed(self, peer: Peer) -> bool:
        return any(peer.key in fetch.peers for fetch in self._fetches.values())
