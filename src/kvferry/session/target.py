"""The target side: fetch a request's cache from every source rank that holds a part, and decode only what is valid.

A fetch goes through: meet the peers (once per incarnation), claim, read, tell that the bytes have landed, be told that
they are valid. Whatever goes wrong ends the fetch with one typed error; its blocks stay in quarantine until no ticket
can write to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.plan.copies import NOTHING
from kvferry.plan.digest import Policy
from kvferry.plan.extract import Extractor
from kvferry.plan.layout import Layout, fingerprint
from kvferry.plan.request import copies_for
from kvferry.session.events import (
    AbortWanted,
    AnswerArrived,
    Cancel,
    Command,
    Count,
    Digest,
    Digested,
    Disconnect,
    DropDigest,
    Failed,
    Fetched,
    FetchWanted,
    HoldWanted,
    PeerConnected,
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
from kvferry.session.handshake import Handshakes, Peer
from kvferry.session.holds import Holds
from kvferry.session.programs import Bindings
from kvferry.session.verify import cannot_digest, no_digest, other_bytes
from kvferry.wire.messages import (
    Aborted,
    Claim,
    Grant,
    Landed,
    Offer,
    Party,
    Reason,
    Refusal,
    Renew,
    Renewed,
    Valid,
    Welcome,
)

__all__ = ["Ourselves", "TargetSession"]

TargetEvent = (
    HoldWanted
    | FetchWanted
    | AbortWanted
    | AnswerArrived
    | PeerConnected
    | PeerUnreachable
    | TicketEnded
    | Digested
    | Tick
)

WAITING = (ReadState.CLAIMING, ReadState.READING, ReadState.LANDED, ReadState.DIGESTED)
"""States in which a read needs its source to be alive."""
USING = WAITING[1:]
"""States in which it needs its lease."""
ASKING = (ReadState.LANDED, ReadState.DIGESTED)
"""States in which it wants to hear whether its bytes are valid."""


@dataclass(frozen=True, slots=True)
class Ourselves:
    """Who this rank is, and the layouts of all ranks of its engine: the route depends on all of them.

    `digest` says how much of what has landed is compared with the source's own.
    """

    party: Party
    product_version: str
    layouts: tuple[Layout, ...]
    digest: Policy = Policy.OFF


class TargetSession:
    """Fetches of one rank. Feed it events; do what its commands say."""

    def __init__(self, ourselves: Ourselves, timing: Timing) -> None:
        self._ours = ourselves.party
        self._timing = timing
        self._peers = Handshakes(ourselves.party, ourselves.product_version, timing)
        self._policy = ourselves.digest
        self._bindings = Bindings(ourselves.layouts, ourselves.party.rank)
        self._extractor = Extractor(ourselves.layouts[ourselves.party.rank], "target")
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
        if wrong := _stranger(peer.key, welcome.party):
            yield from self._lose(peer.key, wrong, now)
            return
        yield from self._peers.welcomed(peer, welcome, now)
        for other in self._peers:
            if _is_replaced(other.key, peer.key):
                # This incarnation has answered, so that one is gone, and its memory need not be kept mapped.
                error = TransferError(Reason.PEER_LOST, f"{other.key} has been replaced by {peer.key}")
                yield from self._lose(other.key, error, now)

    def _offer(self, peer: Peer, offer: Offer, now: float) -> Iterator[Command]:
        if not peer.machine.allows("offer"):
            # Repeated, or late: it answers a handshake that has been given up.
            return
        wrong = _stranger(peer.key, offer.party)
        if wrong is None and fingerprint(offer.layout) != peer.fingerprint:
            wrong = TransferError(Reason.MALFORMED, f"{peer.key} offers another layout than it has announced")
        if wrong is None:
            yield from self._peers.offered(peer, offer)
        else:
            yield from self._lose(peer.key, wrong, now)

    def _connected(self, event: PeerConnected, now: float) -> Iterator[Command]:
        if event.peer not in self._peers:
            return
        if self._peers.connected(self._peers[event.peer], event.transport, event.choice, now):
            for fetch in [fetch for fetch in self._fetches.values() if event.peer in fetch.peers]:
                yield from self._claim_when_ready(fetch, now)

    def _unreachable(self, event: PeerUnreachable, now: float) -> Iterator[Command]:
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
        if binding.unreadable and self._policy is Policy.FULL:
            yield from self._fail(fetch, cannot_digest(binding.unreadable), now)
            return
        for key in binding.programs:
            if not self._waiting_for(self._peers[key]):
                # It had no reason to say anything until now: its silence begins here.
                self._peers[key].last_heard = now
        fetch.start_reads(tuple(binding.programs), now)
        for key in binding.programs:
            yield Send(key, self._claim_of(fetch, binding.readers_of(key)))
        if not fetch.reads:
            # Other ranks of ours have all the work, and tell the sources.
            fetch.posted_at = fetch.landed_at = now
            del self._fetches[fetch.wanted.request_id]
            verified = binding.verified_by(self._policy)
            yield Fetched(fetch.wanted.request_id, fetch.report("", "", verified, now))

    def _claim_of(self, fetch: Fetch, readers: tuple[int, ...]) -> Claim:
        wanted = fetch.wanted
        return Claim(self._ours, wanted.request_id, wanted.reference, wanted.num_tokens, readers)

    def _grant(self, peer: Peer, grant: Grant, now: float) -> Iterator[Command]:
        for fetch, read in self._read(peer.key, grant.claim_id, ReadState.CLAIMING):
            program = self._bindings.to(fetch.peers, self._peers).programs[peer.key]
            wanted = fetch.wanted
            try:
                # Without tokens there is no state of fixed size either: the source is just to be told.
                copies = NOTHING
                if wanted.num_tokens:
                    copies = copies_for(program, grant.block_tables, wanted.block_tables, wanted.ranges)
            except RequestError as error:
                yield from self._fail(fetch, TransferError(Reason.OUT_OF_RANGE, str(error)), now)
                return
            read.posted(copies)
            fetch.posted_at = now
            yield Post(ReadKey(wanted.request_id, peer.key), copies)

    def _ticket_ended(self, event: TicketEnded, now: float) -> Iterator[Command]:
        fetch = self._fetches.get(event.key.request_id)
        if fetch is None or event.key.peer not in fetch.reads:
            return
        read = fetch.reads[event.key.peer]
        read.machine.move("ticket ended")
        if fetch.failed:
            yield from self._free_when_drained(fetch)
        elif event.error:
            yield from self._fail(fetch, TransferError(Reason.TRANSPORT, "the read failed", found=event.error), now)
        else:
            fetch.landed_at = read.last_sent = now
            yield from self._landed(fetch, event.key, now)

    # --- is it what the source has? ---

    def _landed(self, fetch: Fetch, key: ReadKey, now: float) -> Iterator[Command]:
        """Ask whether the bytes are valid, and digest them meanwhile."""
        read, wanted = fetch.reads[key.peer], fetch.wanted
        try:
            read.subject = self._bindings.to(fetch.peers, self._peers).subject(key.peer, wanted, self._policy)
            extracts = self._extractor.extracts(read.subject, wanted.block_tables, wanted.num_tokens)
        except FerryError as error:
            yield from self._fail(fetch, no_digest(str(error)), now)
            return
        yield Send(key.peer, self._landed_of(fetch, read))
        if extracts:
            yield Digest(key, extracts)
        else:
            read.machine.move("digested")

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
            verified = binding.verified_by(self._policy)
            yield Fetched(fetch.wanted.request_id, fetch.report(peer.transport, peer.choice, verified, now))

    def _landed_of(self, fetch: Fetch, read: Read) -> Landed:
        wanted = fetch.wanted
        return Landed(self._ours, wanted.request_id, wanted.reference.lease_id, read.subject)

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
            if read.state is ReadState.READING:
                yield Cancel(ReadKey(request_id, key))
            if read.is_digesting:
                yield DropDigest(ReadKey(request_id, key))
            read.machine.move("fail")
        for key in fetch.peers:
            yield from self._farewells.say(fetch.wanted, key, now)
        yield from self._free_when_drained(fetch)

    def _free_when_drained(self, fetch: Fetch) -> Iterator[Command]:
        if not fetch.has_open_tickets:
            self._fetches.pop(fetch.wanted.request_id, None)
            yield TargetFree(fetch.wanted.request_id)

    # --- answers ---

    def _answer(self, event: AnswerArrived, now: float) -> Iterator[Command]:
        handlers: dict[type, Callable[..., Iterator[Command]]] = {
            Welcome: self._welcome,
            Offer: self._offer,
            Grant: self._grant,
            Valid: self._valid,
            Renewed: self._renewed,
            Aborted: self._aborted,
            Refusal: self._refused,
        }
        handler = handlers.get(type(event.message))
        if handler is None:
            yield Count("unexpected_messages", type(event.message).__name__)
        elif event.peer in self._peers:
            peer = self._peers[event.peer]
            peer.last_heard = now
            yield from handler(peer, event.message, now)

    def _aborted(self, peer: Peer, aborted: Aborted, now: float) -> Iterator[Command]:
        self._farewells.noted(aborted.claim_id, peer.key)
        yield from ()

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
            reading = peer.key in fetch.reads and fetch.reads[peer.key].state is ReadState.READING
            if reading and fetch.wanted.reference.lease_id in renewed.gone:
                yield from self._fail(fetch, error, now)

    # --- time ---

    def _tick(self, event: Tick, now: float) -> Iterator[Command]:
        for peer in self._peers:
            yield from self._watch(peer, now)
        for fetch in list(self._fetches.values()):
            yield from self._hurry(fetch, now)
        yield from self._farewells.repeat(now)
        self._holds.expire(now)
        if now - self._last_heartbeat >= self._timing.heartbeat_s:
            self._last_heartbeat = now
            yield from self._heartbeats()

    def _watch(self, peer: Peer, now: float) -> Iterator[Command]:
        """Repeat an unanswered question of the handshake; give a peer up that stays silent while it is needed."""
        if not peer.ready:
            if now >= peer.deadline:
                what = f"no handshake with {peer.key} within {self._timing.handshake_s:g} s"
                hint = "does that engine run, and do both engines have the same --token-file?"
                yield from self._lose(peer.key, TransferError(Reason.DEADLINE, what, hint=hint), now)
            else:
                yield from self._peers.repeat(peer, now)
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
        limit_s = self._timing.handshake_s + self._timing.transfer_s
        if not fetch.failed and now - fetch.began > limit_s:
            what = f"the fetch took longer than {limit_s:g} s"
            yield from self._fail(fetch, TransferError(Reason.DEADLINE, what), now)
            return
        for key, read in fetch.reads.items():
            if read.state is ReadState.READING and now - fetch.posted_at > self._timing.transfer_s:
                what = f"the read took longer than {self._timing.transfer_s:g} s"
                yield from self._fail(fetch, TransferError(Reason.DEADLINE, what), now)
                return
            if now - read.last_sent < self._timing.resend_s:
                continue
            read.last_sent = now
            if read.state is ReadState.CLAIMING:
                readers = self._bindings.to(fetch.peers, self._peers).readers_of(key)
                yield Send(key, self._claim_of(fetch, readers))
            elif read.state in ASKING:
                yield Send(key, self._landed_of(fetch, read))

    def _heartbeats(self) -> Iterator[Command]:
        by_peer: dict[PeerKey, list[str]] = {}
        for fetch in self._fetches.values():
            for key, read in fetch.reads.items():
                if read.state in USING:
                    by_peer.setdefault(key, []).append(fetch.wanted.reference.lease_id)
        for key, lease_id in self._holds.leases():
            if key in self._peers and self._peers[key].ready:
                by_peer.setdefault(key, []).append(lease_id)
        for key, lease_ids in by_peer.items():
            yield Send(key, Renew(self._ours, tuple(lease_ids)))


def _is_replaced(older: PeerKey, newer: PeerKey) -> bool:
    """Another start of the same engine, or another engine at the same address: some have a new id at every start."""
    restarted = older.engine_id == newer.engine_id and older.epoch != newer.epoch
    return restarted or (older.address == newer.address and older != newer)


def _stranger(key: PeerKey, party: Party) -> TransferError | None:
    """Who answers must be who was addressed."""
    if (party.engine_id, party.epoch) == (key.engine_id, key.epoch):
        return None
    found = f"{party.engine_id}#{party.epoch}"
    return TransferError(Reason.WRONG_ENGINE, f"somebody else answers at {key.address}", found=found, expected=str(key))
