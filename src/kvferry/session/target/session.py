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
from kvferry.session import events as e
from kvferry.session.commands import Command, Count, Disconnect
from kvferry.session.keys import PeerKey, ReadKey, SlotKey, peers_of
from kvferry.session.target.liveness import Liveness, absent, silent, stranger
from kvferry.session.target.lookups import Lookups
from kvferry.session.target.peers.handshakes import Handshakes, PeerLost, PeerReady, TargetIdentity
from kvferry.session.target.peers.peer import Peer, PeerState
from kvferry.session.target.quarantine import PendingAborts, Quarantine
from kvferry.session.target.reads import fetch as f
from kvferry.session.target.reads.lifecycle import Reads
from kvferry.session.timing import Timing
from kvferry.wire import messages as m
from kvferry.wire.messages import Reason

# Of an engine that nobody has heard of yet: it may be about to start.
STARTING_S = 3.0

_EngineEvent = e.LocateRequest | e.HoldRequest | e.FetchRequest | e.AbortRequest
_PeerEvent = e.AnswerArrived | e.PeerConnected | e.PeerUnreachable | e.PeerMoved
_AddressEvent = e.PeerGone | e.HostSilent | e.HandshakeRefused
TargetEvent = _EngineEvent | _PeerEvent | _AddressEvent | e.TicketEnded | e.Acquired | e.Staged | e.Digested | e.Tick
Step = f.Step | PeerLost | PeerReady


class TargetSession:
    """Fetches of one rank. Give it every event, and carry out the commands that it returns."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        self._timing = timing
        self._peers = Handshakes(identity, timing)
        self._lookups = Lookups(identity, timing)
        self._fetches: dict[str, f.Fetch] = {}
        self._reads = Reads(identity, self._peers, self._fetches, timing)
        self._aborts = PendingAborts(identity.party, self._peers, timing)
        self._quarantine = Quarantine(self._fetches, self._aborts, self._peers)
        self._liveness = Liveness(identity.party, self._peers, self._fetches, timing)
        self._handlers: dict[type, Callable[..., Iterator[Step]]] = {
            e.LocateRequest: self._lookups.begin,
            e.HoldRequest: self._hold,
            e.FetchRequest: self._fetch,
            e.AbortRequest: self._abort,
            e.AnswerArrived: self._answer,
            e.PeerConnected: self._peers.connected,
            e.PeerUnreachable: self._peers.unreachable,
            e.PeerMoved: self._reads.moved,
            e.PeerGone: self._gone,
            e.HostSilent: self._silent,
            e.HandshakeRefused: self._handshake_refused,
            e.TicketEnded: self._ticket_ended,
            e.Acquired: self._reads.staged.acquired,
            e.Staged: self._staged,
            e.Digested: self._reads.verifier.digested,
            e.Tick: self._tick,
        }
        self._answers: dict[type, Callable[..., Iterator[Step]]] = {
            m.Welcome: self._peers.welcomed,
            m.Offer: self._peers.offered,
            m.Reached: self._peers.reached,
            m.Grant: self._reads.grant,
            m.Packed: self._packed,
            m.Queued: self._reads.queued,
            m.Written: self._reads.written,
            m.Valid: self._reads.verifier.valid,
            m.Renewed: self._renewed,
            m.Refusal: self._refused,
        }

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`."""
        return list(self._follow(self._handlers[type(event)](event, now), now))

    def next_deadline(self, now: float) -> float:
        """When `handle(Tick())` is due next; infinity when nothing is waited for."""
        if any(read.awaits_turn for fetch in self._fetches.values() for read in fetch.reads.values()):
            return now
        if self._fetches or self._liveness.queued or self._aborts or self._lookups or self._peers.meeting:
            return now + min(self._timing.heartbeat_s, self._timing.resend_s) / 2
        return self._liveness.next_idle_s if self._peers else float("inf")

    def num_open(self) -> int:
        """Fetches that are not over, quarantined ones included."""
        return len(self._fetches)

    def may_be_written(self) -> bool:
        """Whether a peer may be accessing our memory: it writes, or tests how it could."""
        testing = any(
            peer.direction is Direction.WRITE or peer.machine.state is PeerState.OFFERING
            for peer in self._peers.meeting
        )
        return testing or any(read.is_exposed for fetch in self._fetches.values() for read in fetch.reads.values())

    def written_ids(self) -> frozenset[str]:
        """Requests to whose blocks a source may be writing, for all we know. Staging memory is nobody's block."""
        return frozenset(
            fetch.request.request_id
            for fetch in self._fetches.values()
            if any(read.is_exposed and not read.strategy.is_staged for read in fetch.reads.values())
        )

    def _follow(self, steps: Iterator[Step], now: float) -> Iterator[Command]:
        """Handle what concerns fetches at once, before the steps that follow."""
        for step in steps:
            match step:
                case PeerLost():
                    self._liveness.lost(step, now)
                    yield from self._lose(step.peer, step.error, now)
                case PeerReady():
                    yield from self._follow(self._claim_what_waits(step.peer, now), now)
                case f.FetchBroken():
                    yield from self._quarantine.fail(step.fetch, step.error, now)
                case _:
                    yield step

    def _lose(self, key: PeerKey, error: TransferError, now: float) -> Iterator[Command]:
        """Forget a peer and fail everything that depends on it. The next fetch begins a new handshake."""
        self._peers.forget(key)
        self._reads.bindings.forget(key)
        for fetch in list(self._fetches.values()):
            if key in fetch.peers and not fetch.failed:
                yield from self._quarantine.fail(fetch, error, now)
        yield Disconnect(key)
        for access in self._aborts.access_of(key):
            # It may be known by other addresses, and writes by one access.
            for other in self._peers.known_as(access):
                self._liveness.lost(PeerLost(other, error), now)
                yield from self._lose(other, error, now)
            yield from self._quarantine.revoke(access)

    # --- the engine's side ---

    def _hold(self, event: e.HoldRequest, now: float) -> Iterator[Step]:
        self._liveness.hold(event, now)
        for key in peers_of(event.reference, event.addresses):
            yield from self._peers.greet(key, now)

    def _fetch(self, event: e.FetchRequest, now: float) -> Iterator[Step]:
        self._liveness.fetched(event.reference)
        peers = peers_of(event.reference, event.addresses)
        fetch = f.Fetch(event, peers, began=now)
        self._fetches[event.claim_id] = fetch
        for key in peers:
            yield from self._peers.greet(key, now)
        yield from self._reads.claim_when_ready(fetch, now)

    def _abort(self, event: e.AbortRequest, now: float) -> Iterator[Step]:
        for fetch in list(self._fetches.values()):
            if fetch.request.request_id == event.request_id and not fetch.failed:
                yield f.FetchBroken(fetch, TransferError(Reason.ABORTED, "the request was aborted"))

    def _claim_what_waits(self, key: PeerKey, now: float) -> Iterator[Step]:
        for fetch in [fetch for fetch in self._fetches.values() if key in fetch.peers]:
            yield from self._reads.claim_when_ready(fetch, now)

    # --- reading ---

    def _packed(self, peer: Peer, packed: m.Packed, now: float) -> Iterator[Step]:
        yield from self._reads.packed(peer, packed, now)
        yield from self._quarantine.drained(ReadKey(packed.claim_id, peer.key))

    def _ticket_ended(self, event: e.TicketEnded, now: float) -> Iterator[Step]:
        key = event.key.work if isinstance(event.key, SlotKey) else event.key
        fetch = self._fetches.get(key.claim_id) if isinstance(key, ReadKey) else None
        if fetch is None or not isinstance(key, ReadKey) or key.peer not in fetch.reads:
            return
        was_open = not fetch.failed
        if isinstance(event.key, SlotKey):
            yield from self._reads.staged.filled(event.key, event.error, now)
            yield from self._quarantine.drained(key)
        else:
            fetch.reads[key.peer].ended(Direction.READ)
            if fetch.failed:
                yield from self._quarantine.free_when_drained(fetch)
            else:
                yield from self._reads.ticket_ended(fetch, key.peer, event.error, now)
        if was_open and event.error:
            # The others were cancelled, whatever their tickets say.
            yield from self._liveness.read_failed(key.peer, fetch.began, event.error, now)

    def _staged(self, event: e.Staged, now: float) -> Iterator[Step]:
        yield from self._reads.staged.staged(event, now)
        yield from self._quarantine.drained(event.key.work)

    # --- answers ---

    def _answer(self, event: e.AnswerArrived, now: float) -> Iterator[Step]:
        yield from self._lookups.answered(event.peer, event.message, now)
        handler = self._answers.get(type(event.message))
        if isinstance(event.message, m.Aborted):
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

    def _refused(self, peer: Peer, refusal: m.Refusal, now: float) -> Iterator[Step]:
        error = TransferError(
            refusal.reason, f"the source refused: {refusal.what}", found=refusal.found, expected=refusal.expected
        )
        if refusal.claim_id:
            for fetch, _ in f.reads_of(self._fetches, peer.key, refusal.claim_id, *f.WAITING):
                yield f.FetchBroken(fetch, error)
        elif refusal.reason == Reason.UNREACHABLE and peer.machine.allows("refused"):
            yield from self._peers.not_reached(peer, refusal.reason, now)
        else:
            yield PeerLost(peer.key, error)

    def _renewed(self, peer: Peer, renewed: m.Renewed, now: float) -> Iterator[Step]:
        self._liveness.renewed(peer.key, renewed, now)
        error = TransferError(Reason.EXPIRED, "the lease expired before the transfer was complete")
        for fetch in list(self._fetches.values()):
            reading = peer.key in fetch.reads and fetch.reads[peer.key].state is f.ReadState.MOVING
            if reading and fetch.request.reference.lease_id in renewed.gone:
                yield f.FetchBroken(fetch, error)

    # --- time, and the end of peers ---

    def _gone(self, event: e.PeerGone, now: float) -> Iterator[Step]:
        yield from self._lookups.failed(event.peer, absent(event.peer), now, STARTING_S)
        yield from self._liveness.gone(event.peer)
        # This covers what has just failed, too: no acknowledgement of this process can come.
        self._aborts.gone(event.peer, now)

    def _silent(self, event: e.HostSilent, now: float) -> Iterator[Step]:
        yield from self._lookups.failed(event.peer, silent(event.peer), now)
        yield from self._liveness.silent(event.peer, now)

    def _handshake_refused(self, event: e.HandshakeRefused, now: float) -> Iterator[Step]:
        yield from self._lookups.failed(event.peer, stranger(event.peer), now)
        yield from self._liveness.refused(event.peer, now)

    def _tick(self, event: e.Tick, now: float) -> Iterator[Step]:
        yield from self._lookups.repeat(now)
        yield from self._liveness.watch(now)
        for fetch in list(self._fetches.values()):
            yield from self._reads.retry(fetch, now)
        yield from self._quarantine.end_acknowledged(now)
        yield from self._aborts.repeat(now)
        yield from self._liveness.meet_again(now)
        yield from self._liveness.renew(now)
