"""The reads of all fetches, from the claim to the valid bytes: what a source says moves them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.plan.copies import NOTHING, Direction
from kvferry.plan.digest import Policy
from kvferry.plan.request import copies_for
from kvferry.session.claims import ASKING, WAITING, claim_of, overdue
from kvferry.session.events import Command, Digested, Fetched, PeerKey, Post, ReadKey, Send, Timing
from kvferry.session.fetch import Fetch, Read, ReadState
from kvferry.session.handshake import Handshakes, Ourselves, Peer
from kvferry.session.programs import Bindings
from kvferry.session.verify import Verifier, cannot_digest, no_digest, other_bytes
from kvferry.wire.messages import Claim, Grant, Reason, Valid, Written

__all__ = ["Broken", "Reads"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A fetch that cannot go on, and why."""

    fetch: Fetch
    error: TransferError


Step = Command | Broken
"""What follows from a word: a command, or that a fetch cannot go on."""


class Reads:
    """Of the fetches of one rank. `fetches` is the session's own record of them; one that is over leaves it."""

    def __init__(self, ours: Ourselves, peers: Handshakes, fetches: dict[str, Fetch], timing: Timing) -> None:
        self._ours = ours.party
        self._timing = timing
        self._peers = peers
        self._fetches = fetches
        self._verifier = Verifier(ours.party, ours.layouts[ours.party.rank], ours.digest)
        self.bindings = Bindings(ours.layouts, ours.party.rank)

    def wait_for(self, peer: PeerKey) -> bool:
        """Whether a read needs this source to be alive."""
        return any(fetch.reads[peer].state in WAITING for fetch in self._fetches.values() if peer in fetch.reads)

    def claim_when_ready(self, fetch: Fetch, now: float) -> Iterator[Step]:
        """Once all sources of a fetch have been met, claim from those that have something for us."""
        if fetch.failed or fetch.reads or not all(self._peers[key].ready for key in fetch.peers):
            return
        try:
            binding = self.bindings.to(fetch.peers, self._peers)
        except FerryError as error:
            yield Broken(fetch, TransferError(Reason.INCOMPATIBLE, str(error)))
            return
        if binding.unreadable and self._verifier.policy is Policy.FULL:
            yield Broken(fetch, cannot_digest(binding.unreadable))
            return
        for key in binding.programs:
            if not self.wait_for(key):
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
        readers = self.bindings.to(fetch.peers, self._peers).readers_of(key)
        return claim_of(self._ours, fetch.wanted, readers, fetch.reads[key].direction)

    def grant(self, peer: Peer, grant: Grant, now: float) -> Iterator[Step]:
        """A source lets us read, or has begun to write."""
        for fetch, read in self.of(peer.key, grant.claim_id, ReadState.CLAIMING, ReadState.EXPOSED):
            if read.direction is Direction.READ:
                yield from self._post(fetch, peer.key, grant, now)
            else:
                read.machine.move("granted")
                fetch.posted_at = now

    def _post(self, fetch: Fetch, key: PeerKey, grant: Grant, now: float) -> Iterator[Step]:
        program = self.bindings.to(fetch.peers, self._peers).programs[key]
        wanted, read = fetch.wanted, fetch.reads[key]
        try:
            # Without tokens there is no state of fixed size either: the source is just to be told.
            copies = NOTHING
            if wanted.num_tokens:
                copies = copies_for(program, grant.block_tables, wanted.block_tables, wanted.ranges)
        except RequestError as error:
            yield Broken(fetch, TransferError(Reason.OUT_OF_RANGE, str(error)))
            return
        read.machine.move("granted")
        read.num_bytes, read.num_rows = copies.num_bytes, len(copies)
        fetch.posted_at = now
        yield Post(fetch.key(key), copies)

    def written(self, peer: Peer, written: Written, now: float) -> Iterator[Step]:
        """The source's own ticket has ended well."""
        for fetch, read in self.of(peer.key, written.claim_id, ReadState.EXPOSED, ReadState.MOVING):
            if read.direction is Direction.WRITE:
                read.num_bytes, read.num_rows = written.num_bytes, written.num_rows
                fetch.posted_at = fetch.posted_at or now
                read.machine.move("ticket ended")
                yield from self._landed(fetch, peer.key, now)

    def ticket_ended(self, fetch: Fetch, key: PeerKey, error: str, now: float) -> Iterator[Step]:
        """A ticket of ours."""
        if error:
            yield Broken(fetch, TransferError(Reason.TRANSPORT, "the read failed", found=error))
        else:
            yield from self._landed(fetch, key, now)

    def _landed(self, fetch: Fetch, key: PeerKey, now: float) -> Iterator[Step]:
        fetch.landed_at = fetch.reads[key].last_sent = now
        try:
            yield from self._verifier.ask(fetch, key, self.bindings.to(fetch.peers, self._peers))
        except TransferError as error:
            yield Broken(fetch, error)

    def digested(self, event: Digested, now: float) -> Iterator[Step]:
        """Our own side of the comparison."""
        fetch = self._fetches.get(event.key.request_id) if isinstance(event.key, ReadKey) else None
        if fetch is None or not isinstance(event.key, ReadKey) or event.key.peer not in fetch.reads:
            return
        read = fetch.reads[event.key.peer]
        if not read.is_digesting:
            return
        if event.error:
            yield Broken(fetch, no_digest(event.error))
            return
        read.ours = event.values
        read.machine.move("digested")
        yield from self._compare(fetch, event.key.peer, now)

    def valid(self, peer: Peer, valid: Valid, now: float) -> Iterator[Step]:
        """The source's side of it."""
        for fetch, read in self.of(peer.key, valid.claim_id, *ASKING):
            read.theirs = valid.digests
            read.machine.move("valid")
            yield from self._compare(fetch, peer.key, now)

    def _compare(self, fetch: Fetch, key: PeerKey, now: float) -> Iterator[Step]:
        """Once both sides have spoken: the bytes of this read are the source's own, or the fetch fails."""
        read = fetch.reads[key]
        if read.state is not ReadState.VALID:
            return
        for error in other_bytes(key, read):
            yield Broken(fetch, error)
        if fetch.all_in(ReadState.VALID):
            peer, binding = self._peers[key], self.bindings.to(fetch.peers, self._peers)
            del self._fetches[fetch.wanted.request_id]
            verified = binding.verified_by(self._verifier.policy)
            yield Fetched(fetch.wanted.request_id, fetch.report(peer.transport, peer.choice, verified, now))

    def of(self, key: PeerKey, claim_id: str, *states: ReadState) -> list[tuple[Fetch, Read]]:
        """The read of a claim from a peer, if it is in one of the states; late and repeated answers match none."""
        fetch = self._fetches.get(claim_id)
        if fetch is None or key not in fetch.reads or fetch.reads[key].state not in states:
            return []
        return [(fetch, fetch.reads[key])]

    def hurry(self, fetch: Fetch, now: float) -> Iterator[Step]:
        """Repeat what was not answered, and end what takes too long."""
        for error in overdue(fetch, self._timing, now):
            yield Broken(fetch, error)
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
