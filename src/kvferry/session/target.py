"""The target side: fetch a request's cache from every source rank that holds a part, and decode only what is valid.

A fetch goes through: meet the peers (once per incarnation), claim, have the bytes moved, tell that they have landed, be
told that they are valid. Who moves them, we or the source, is a property of the read: what differs is only who says
that its ticket has ended. Whatever goes wrong ends the fetch with one typed error; its blocks stay in quarantine until
no ticket can write to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.plan.copies import NOTHING, Direction
from kvferry.plan.digest import Policy
from kvferry.plan.request import copies_for
from kvferry.session.claims import ASKING, WAITING, claim_of, overdue, renewals
from kvferry.session.events import (
    AbortWanted,
    AnswerArrived,
    Cancel,
    Command,
    Count,
    Digested,
    Disconnect,
    DropDigest,
    Failed,
    Fetched,
    FetchWanted,
    HoldWanted,
    PeerConnected,
    PeerGone,
    PeerKey,
    PeerUnreachable,
    Post,
    ReadKey,
    Send,
    TargetFree,
    Tick,
    TicketEnded,
    Timing,
    peers_of,
)
from kvferry.session.farewell import Farewells
from kvferry.session.fetch import Fetch, Read, ReadState
from kvferry.session.handshake import Handshakes, Lost, Ourselves, Peer, Step
from kvferry.session.holds import Holds
from kvferry.session.programs import Bindings
from kvferry.session.verify import Verifier, cannot_digest, no_digest, other_bytes
from kvferry.wire.messages import (
    Aborted,
    Claim,
    Grant,
    Offer,
    Reached,
    Reason,
    Refusal,
    Renewed,
    Valid,
    Welcome,
    Written,
)

__all__ = ["Ourselves", "TargetSession"]

TargetEvent = (
    HoldWanted
    | FetchWanted
    | AbortWanted
    | AnswerArrived
    | PeerConnected
    | PeerUnreachable
    | PeerGone
    | TicketEnded
    | Digested
    | Tick
)


class TargetSession:
    """Fetches of one rank. Feed it events; do what its commands say."""

    def __init__(self, ourselves: Ourselves, timing: Timing) -> None:
        self._ours = ourselves.party
        self._timing = timing
        self._peers = Handshakes(ourselves, timing)
        self._bindings = Bindings(ourselves.layouts, ourselves.party.rank)
        self._verifier = Verifier(ourselves.party, ourselves.layouts[ourselves.party.rank], ourselves.digest)
        self._fetches: dict[str, Fetch] = {}
        self._farewells = Farewells(ourselves.party, self._peers, timing)
        self._holds = Holds(timing.hold_s)
        self._last_heartbeat = 0.0

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        """The commands that follow from an event at time `now`."""
        handlers: dict[type, Callable[..., Iterator[Command]]] = {
            HoldWanted: self._hold,
            FetchWanted: self._fetch,
            AbortWanted: self._abort,
            AnswerArrived: self._answer,
            PeerConnected: self._connected,
            PeerUnreachable: self._unreachable,
            PeerGone: self._gone,
            TicketEnded: self._ticket_ended,
            Digested: self._digested,
            Tick: self._tick,
        }
        return list(handlers[type(event)](event, now))

    def next_deadline(self, now: float) -> float:
        """When `handle(Tick())` is due next; infinity when there is nobody to watch."""
        if self._fetches or self._holds or self._farewells or not all(peer.ready for peer in self._peers):
            return now + min(self._timing.heartbeat_s, self._timing.resend_s) / 2
        return min((peer.last_heard + self._timing.idle_peer_s for peer in self._peers), default=float("inf"))

    def num_open(self) -> int:
        """Fetches that are not over, quarantined ones included."""
        return len(self._fetches)

    def may_be_written(self) -> bool:
        """Whether a peer may be reaching into our memory: it writes, or tests how it could."""
        testing = any(not peer.ready and peer.direction is Direction.WRITE for peer in self._peers)
        return testing or any(read.is_exposed for fetch in self._fetches.values() for read in fetch.reads.values())

    # --- the engine's side ---

    def _hold(self, event: HoldWanted, now: float) -> Iterator[Command]:
        self._holds.add(event, now)
        for key in peers_of(event.reference, event.addresses):
            yield from self._peers.meet(key, now)

    def _fetch(self, event: FetchWanted, now: float) -> Iterator[Command]:
        self._holds.end(event.reference)
        peers = peers_of(event.reference, event.addresses)
        fetch = Fetch(event, peers, began=now)
        self._fetches[event.request_id] = fetch
        for key in peers:
            yield from self._peers.meet(key, now)
        yield from self._claim_when_ready(fetch, now)

    def _abort(self, event: AbortWanted, now: float) -> Iterator[Command]:
        fetch = self._fetches.get(event.request_id)
        if fetch is not None and not fetch.failed:
            yield from self._fail(fetch, TransferError(Reason.ABORTED, "the request was aborted"), now)

    # --- meeting peers ---

    def _welcome(self, peer: Peer, welcome: Welcome, now: float) -> Iterator[Command]:
        yield from self._follow(self._peers.welcomed(peer, welcome, now), now)

    def _offer(self, peer: Peer, offer: Offer, now: float) -> Iterator[Command]:
        yield from self._follow(self._peers.offered(peer, offer, now), now)

    def _follow(self, steps: Iterator[Step], now: float) -> Iterator[Command]:
        for step in steps:
            if isinstance(step, Lost):
                yield from self._lose(step.peer, step.error, now)
            else:
                yield step

    def _reached(self, peer: Peer, reached: Reached, now: float) -> Iterator[Command]:
        """The source says the same as a transport of ours would."""
        if peer.direction is Direction.WRITE:
            yield from self._connected(PeerConnected(peer.key, reached.transport, reached.choice), now)

    def _connected(self, event: PeerConnected, now: float) -> Iterator[Command]:
        if not isinstance(event.peer, PeerKey) or event.peer not in self._peers:
            return
        if self._peers.connected(self._peers[event.peer], event.transport, event.choice, now):
            for fetch in [fetch for fetch in self._fetches.values() if event.peer in fetch.peers]:
                yield from self._claim_when_ready(fetch, now)

    def _unreachable(self, event: PeerUnreachable, now: float) -> Iterator[Command]:
        if not isinstance(event.peer, PeerKey):
            return
        error = TransferError(
            Reason.UNREACHABLE,
            "no transport reaches the source",
            found=event.error,
            hint="start both engines with --transport tcp",
        )
        yield from self._lose(event.peer, error, now)

    def _lose(self, key: PeerKey, error: TransferError, now: float) -> Iterator[Command]:
        """Forget a peer and fail everything that depends on it. The next fetch meets it anew."""
        self._peers.forget(key)
        self._bindings.forget(key)
        for fetch in list(self._fetches.values()):
            if key in fetch.peers and not fetch.failed:
                yield from self._fail(fetch, error, now)
        yield Disconnect(key)

    # --- claiming and reading ---

    def _claim_when_ready(self, fetch: Fetch, now: float) -> Iterator[Command]:
        if fetch.failed or fetch.reads or not all(self._peers[key].ready for key in fetch.peers):
            return
        try:
            binding = self._bindings.to(fetch.peers, self._peers)
        except FerryError as error:
            yield from self._fail(fetch, TransferError(Reason.INCOMPATIBLE, str(error)), now)
            return
        if binding.unreadable and self._verifier.policy is Policy.FULL:
            yield from self._fail(fetch, cannot_digest(binding.unreadable), now)
            return
        for key in binding.programs:
            if not self._waiting_for(self._peers[key]):
                # It had no reason to say anything until now: its silence begins here.
                self._peers[key].last_heard = now
        fetch.start_reads({key: self._peers[key].direction for key in binding.programs}, now)
        for key in binding.programs:
            yield Send(key, self._claim_of(fetch, key))
        if not fetch.reads:
            # Other ranks of ours have all the work, and tell the sources.
            fetch.posted_at = fetch.landed_at = now
            del self._fetches[fetch.wanted.request_id]
            verified = binding.verified_by(self._verifier.policy)
            yield Fetched(fetch.wanted.request_id, fetch.report("", "", verified, now))

    def _claim_of(self, fetch: Fetch, key: PeerKey) -> Claim:
        readers = self._bindings.to(fetch.peers, self._peers).readers_of(key)
        return claim_of(self._ours, fetch.wanted, readers, fetch.reads[key].direction)

    def _grant(self, peer: Peer, grant: Grant, now: float) -> Iterator[Command]:
        for fetch, read in self._read(peer.key, grant.claim_id, ReadState.CLAIMING, ReadState.EXPOSED):
            if read.direction is Direction.READ:
                yield from self._post(fetch, peer.key, grant, now)
            else:
                read.machine.move("granted")
                fetch.posted_at = now

    def _post(self, fetch: Fetch, key: PeerKey, grant: Grant, now: float) -> Iterator[Command]:
        program = self._bindings.to(fetch.peers, self._peers).programs[key]
        wanted, read = fetch.wanted, fetch.reads[key]
        try:
            # Without tokens there is no state of fixed size either: the source is just to be told.
            copies = NOTHING
            if wanted.num_tokens:
                copies = copies_for(program, grant.block_tables, wanted.block_tables, wanted.ranges)
        except RequestError as error:
            yield from self._fail(fetch, TransferError(Reason.OUT_OF_RANGE, str(error)), now)
            return
        read.machine.move("granted")
        read.num_bytes, read.num_rows = copies.num_bytes, len(copies)
        fetch.posted_at = now
        yield Post(fetch.key(key), copies)

    def _written(self, peer: Peer, written: Written, now: float) -> Iterator[Command]:
        """The source's own ticket has ended well."""
        for fetch, read in self._read(peer.key, written.claim_id, ReadState.EXPOSED, ReadState.MOVING):
            if read.direction is Direction.WRITE:
                read.num_bytes, read.num_rows = written.num_bytes, written.num_rows
                fetch.posted_at = fetch.posted_at or now
                read.machine.move("ticket ended")
                yield from self._landed(fetch, peer.key, now)

    def _ticket_ended(self, event: TicketEnded, now: float) -> Iterator[Command]:
        """A ticket of ours."""
        fetch = self._fetches.get(event.key.request_id) if isinstance(event.key, ReadKey) else None
        if fetch is None or not isinstance(event.key, ReadKey) or event.key.peer not in fetch.reads:
            return
        read = fetch.reads[event.key.peer]
        read.machine.move("ticket ended")
        if fetch.failed:
            yield from self._free_when_drained(fetch)
        elif event.error:
            yield from self._fail(fetch, TransferError(Reason.TRANSPORT, "the read failed", found=event.error), now)
        else:
            yield from self._landed(fetch, event.key.peer, now)

    # --- is it what the source has? ---

    def _landed(self, fetch: Fetch, key: PeerKey, now: float) -> Iterator[Command]:
        fetch.landed_at = fetch.reads[key].last_sent = now
        try:
            yield from self._verifier.ask(fetch, key, self._bindings.to(fetch.peers, self._peers))
        except TransferError as error:
            yield from self._fail(fetch, error, now)

    def _digested(self, event: Digested, now: float) -> Iterator[Command]:
        fetch = self._fetches.get(event.key.request_id) if isinstance(event.key, ReadKey) else None
        if fetch is None or not isinstance(event.key, ReadKey) or event.key.peer not in fetch.reads:
            return
        read = fetch.reads[event.key.peer]
        if not read.is_digesting:
            return
        if event.error:
            yield from self._fail(fetch, no_digest(event.error), now)
            return
        read.ours = event.values
        read.machine.move("digested")
        yield from self._compare(fetch, event.key.peer, now)

    def _valid(self, peer: Peer, valid: Valid, now: float) -> Iterator[Command]:
        for fetch, read in self._read(peer.key, valid.claim_id, *ASKING):
            read.theirs = valid.digests
            read.machine.move("valid")
            yield from self._compare(fetch, peer.key, now)

    def _compare(self, fetch: Fetch, key: PeerKey, now: float) -> Iterator[Command]:
        """Once both sides have spoken: the bytes of this read are the source's own, or the fetch fails."""
        read = fetch.reads[key]
        if read.state is not ReadState.VALID:
            return
        for error in other_bytes(key, read):
            yield from self._fail(fetch, error, now)
        if fetch.all_in(ReadState.VALID):
            peer, binding = self._peers[key], self._bindings.to(fetch.peers, self._peers)
            del self._fetches[fetch.wanted.request_id]
            verified = binding.verified_by(self._verifier.policy)
            yield Fetched(fetch.wanted.request_id, fetch.report(peer.transport, peer.choice, verified, now))

    def _read(self, key: PeerKey, claim_id: str, *states: ReadState) -> list[tuple[Fetch, Read]]:
        """The read of a claim from a peer, if it is in one of the states; late and repeated answers match none."""
        fetch = self._fetches.get(claim_id)
        if fetch is None or key not in fetch.reads or fetch.reads[key].state not in states:
            return []
        return [(fetch, fetch.reads[key])]

    # --- failing ---

    def _fail(self, fetch: Fetch, error: TransferError, now: float) -> Iterator[Command]:
        """End a fetch: tell the engine, tell every source, and keep the blocks until nothing can write to them."""
        fetch.failed = True
        request_id = fetch.wanted.request_id
        yield Count("fetches_failed", error.reason)
        yield Failed(request_id, error)
        for key, read in fetch.reads.items():
            if read.state is ReadState.MOVING and read.direction is Direction.READ:
                yield Cancel(ReadKey(request_id, key))
            if read.is_digesting:
                yield DropDigest(ReadKey(request_id, key))
            read.machine.move("fail")
        for key in fetch.peers:
            is_exposed = key in fetch.reads and fetch.reads[key].is_exposed
            yield from self._farewells.say(fetch.wanted, key, is_exposed, now)
        yield from self._free_when_drained(fetch)

    def _gone(self, event: PeerGone, now: float) -> Iterator[Command]:
        self._farewells.gone(event.peer, now)
        yield from ()

    def _end_farewells(self, now: float) -> Iterator[Command]:
        """What sources have acknowledged, or cannot do any more, is over; so is the quarantine that waited for it."""
        for key in self._farewells.take_over(now):
            fetch = self._fetches.get(key.request_id)
            if fetch is not None and key.peer in fetch.reads and fetch.reads[key.peer].is_exposed:
                fetch.reads[key.peer].machine.move("ticket ended")
                yield from self._free_when_drained(fetch)
                if key.peer not in self._peers and not self._farewells.waits_for(key.peer):
                    yield Disconnect(key.peer)

    def _free_when_drained(self, fetch: Fetch) -> Iterator[Command]:
        if not fetch.has_open_tickets:
            self._fetches.pop(fetch.wanted.request_id, None)
            yield TargetFree(fetch.wanted.request_id)

    # --- answers ---

    def _answer(self, event: AnswerArrived, now: float) -> Iterator[Command]:
        handlers: dict[type, Callable[..., Iterator[Command]]] = {
            Welcome: self._welcome,
            Offer: self._offer,
            Reached: self._reached,
            Grant: self._grant,
            Written: self._written,
            Valid: self._valid,
            Renewed: self._renewed,
            Refusal: self._refused,
        }
        handler = handlers.get(type(event.message))
        if isinstance(event.message, Aborted):
            # Wanted also of a peer that counts as lost: it may have woken up.
            self._farewells.noted(event.peer, event.message, now)
            yield from self._end_farewells(now)
        elif handler is None:
            yield Count("unexpected_messages", type(event.message).__name__)
            return
        if event.peer in self._peers:
            peer = self._peers[event.peer]
            peer.last_heard = now
            yield from handler(peer, event.message, now) if handler else ()

    def _refused(self, peer: Peer, refusal: Refusal, now: float) -> Iterator[Command]:
        error = TransferError(
            refusal.reason, f"the source refused: {refusal.what}", found=refusal.found, expected=refusal.expected
        )
        if not refusal.claim_id:
            yield from self._lose(peer.key, error, now)
            return
        for fetch, _ in self._read(peer.key, refusal.claim_id, *WAITING):
            yield from self._fail(fetch, error, now)

    def _renewed(self, peer: Peer, renewed: Renewed, now: float) -> Iterator[Command]:
        error = TransferError(Reason.EXPIRED, "the lease ended before the bytes were there")
        for fetch in list(self._fetches.values()):
            reading = peer.key in fetch.reads and fetch.reads[peer.key].state is ReadState.MOVING
            if reading and fetch.wanted.reference.lease_id in renewed.gone:
                yield from self._fail(fetch, error, now)

    # --- time ---

    def _tick(self, event: Tick, now: float) -> Iterator[Command]:
        for peer in self._peers:
            yield from self._watch(peer, now)
        for fetch in list(self._fetches.values()):
            yield from self._hurry(fetch, now)
        yield from self._end_farewells(now)
        yield from self._farewells.repeat(now)
        self._holds.expire(now)
        if now - self._last_heartbeat >= self._timing.heartbeat_s:
            self._last_heartbeat = now
            held = [
                (key, lease) for key, lease in self._holds.leases() if key in self._peers and self._peers[key].ready
            ]
            yield from renewals(self._ours, self._fetches.values(), held)

    def _watch(self, peer: Peer, now: float) -> Iterator[Command]:
        """Repeat an unanswered question of the handshake; give a peer up that stays silent while it is needed."""
        if not peer.ready:
            yield from self._follow(self._peers.repeat(peer, now), now)
            return
        if self._waiting_for(peer) and now - peer.last_heard > self._timing.silence_s:
            what = f"{peer.key} has not answered for {self._timing.silence_s:g} s"
            yield from self._lose(peer.key, TransferError(Reason.PEER_LOST, what), now)
        elif now >= peer.last_heard + self._timing.idle_peer_s and not self._is_needed(peer):
            # It may be gone for good; if not, the next fetch meets it anew.
            yield from self._lose(peer.key, TransferError(Reason.PEER_LOST, f"{peer.key} was idle"), now)

    def _is_needed(self, peer: Peer) -> bool:
        return any(peer.key in fetch.peers for fetch in self._fetches.values())

    def _waiting_for(self, peer: Peer) -> bool:
        return any(f.reads[peer.key].state in WAITING for f in self._fetches.values() if peer.key in f.reads)

    def _hurry(self, fetch: Fetch, now: float) -> Iterator[Command]:
        """Repeat what was not answered, and end what takes too long."""
        for error in overdue(fetch, self._timing, now):
            yield from self._fail(fetch, error, now)
            return
        for key, read in fetch.reads.items():
            if now - read.last_sent < self._timing.resend_s:
                continue
            read.last_sent = now
            if read.state is ReadState.CLAIMING or (read.is_exposed and not fetch.failed):
                # Asked again, a source that writes says how far it is.
                yield Send(key, self._claim_of(fetch, key))
            elif read.state in ASKING:
                yield Send(key, self._verifier.landed_of(fetch, read))
