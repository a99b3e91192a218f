"""Verification of what has landed: both sides digest it, and the fetch fails if the digests differ."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import MAX_LISTED, FerryError, TransferError
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import Subject
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Digest, Fetched, Send
from kvferry.session.events import Digested, FetchRequest
from kvferry.session.keys import PeerKey, ReadKey
from kvferry.session.target.peers.bindings import Binding
from kvferry.session.target.peers.handshakes import Handshakes, TargetIdentity
from kvferry.session.target.peers.peer import Peer
from kvferry.session.target.reads.fetch import ASKING, Fetch, FetchBroken, Read, ReadState, Step, reads_of
from kvferry.wire.messages import Landed, Reason, Valid


class Verifier:
    """Asks the source to confirm what has landed, has it digested here meanwhile, and compares the digests."""

    def __init__(self, ours: TargetIdentity, peers: Handshakes, fetches: dict[str, Fetch]) -> None:
        self.policy = ours.digest
        self._ours = ours.party
        self._peers = peers
        self._fetches = fetches
        self._extractor = Extractor(ours.layouts[ours.party.rank], "target")

    def landed_of(self, fetch: Fetch) -> Landed:
        """The question whether what has landed is valid."""
        request = fetch.request
        return Landed(self._ours, request.claim_id, request.reference.lease_id)

    def subjects(self, request: FetchRequest, binding: Binding) -> dict[PeerKey, Subject]:
        """What is to be digested of each read. Raises TransferError when it cannot be described."""
        try:
            return {peer: binding.subject(peer, request, self.policy) for peer in binding.programs}
        except FerryError as error:
            raise digest_error(str(error)) from error

    def prepare(self, fetch: Fetch, peer: PeerKey) -> None:
        """Find out where its bytes lie here, once; this is done while answers are awaited, when it delays nothing.

        Raises TransferError when it cannot be digested.
        """
        read, request = fetch.reads[peer], fetch.request
        if read.is_prepared:
            return
        try:
            read.extracts = self._extractor.extracts(read.subject, request.block_tables, request.num_tokens)
        except FerryError as error:
            raise digest_error(str(error)) from error
        read.is_prepared = True

    def landed(self, fetch: Fetch, peer: PeerKey, now: float) -> Iterator[Step]:
        """All bytes of a read are in their blocks: ask whether they are valid, unless the source knows by itself when
        to say so, and digest them meanwhile. If it is not known yet where they lie for that, the question does not wait
        until it is: `digest` follows."""
        read = fetch.reads[peer]
        fetch.landed_at = read.last_sent = now
        if read.direction is Direction.READ:
            yield Send(peer, self.landed_of(fetch))
        if read.is_confirmed:
            read.machine.move("valid")
        if read.is_prepared or not read.subject.parts:
            yield from self.digest(fetch, peer, now)

    def digest(self, fetch: Fetch, peer: PeerKey, now: float) -> Iterator[Step]:
        """Make our own digest of what has landed."""
        read = fetch.reads[peer]
        try:
            self.prepare(fetch, peer)
        except TransferError as error:
            yield FetchBroken(fetch, error)
            return
        if read.extracts:
            yield Digest(fetch.key(peer), read.extracts)
        else:
            read.machine.move("digested")
        yield from self._compare(fetch, peer, now)

    def digested(self, event: Digested, now: float) -> Iterator[Step]:
        """Our own digest is there."""
        fetch = self._fetches.get(event.key.claim_id) if isinstance(event.key, ReadKey) else None
        if fetch is None or not isinstance(event.key, ReadKey) or event.key.peer not in fetch.reads:
            return
        read = fetch.reads[event.key.peer]
        if not read.is_digesting:
            return
        if event.error:
            yield FetchBroken(fetch, digest_error(event.error))
            return
        read.ours = event.values
        read.machine.move("digested")
        yield from self._compare(fetch, event.key.peer, now)

    def valid(self, peer: Peer, valid: Valid, now: float) -> Iterator[Step]:
        """The source confirms that the lease was live, and sends its digests."""
        states = *ASKING, ReadState.EXPOSED, ReadState.MOVING
        for fetch, read in reads_of(self._fetches, peer.key, valid.claim_id, *states):
            fetch.first_token = valid.first_token or fetch.first_token
            if read.state in ASKING:
                read.theirs, peer.num_failed_reads = valid.digests, 0
                read.machine.move("valid")
                yield from self._compare(fetch, peer.key, now)
            elif read.direction is Direction.WRITE:
                read.theirs, read.is_confirmed = valid.digests, True

    def _compare(self, fetch: Fetch, key: PeerKey, now: float) -> Iterator[Step]:
        """Once both digests are there: the bytes of this read are the source's own, or the fetch fails."""
        read = fetch.reads[key]
        if read.state is not ReadState.VALID:
            return
        for error in difference_error(key, read):
            yield FetchBroken(fetch, error)
        if fetch.all_in(ReadState.VALID):
            peer = self._peers[key]
            del self._fetches[fetch.request.claim_id]
            yield Fetched(fetch.request.request_id, fetch.report(peer.transport, peer.choice, now))


def unreadable_error(kinds: str) -> TransferError:
    """The policy asks for digests of memory that the CPU cannot read; known before anything is claimed."""
    return TransferError(
        Reason.DIGEST,
        "digest policy full needs memory that the CPU can read",
        found=f"memory of kind {kinds}",
        hint="choose the digest policy sampled (which skips such memory) or off",
    )


def digest_error(why: str) -> TransferError:
    """The digest of what has landed cannot be made."""
    return TransferError(Reason.DIGEST, "no digest can be made", found=why)


def difference_error(key: PeerKey, read: Read) -> tuple[TransferError, ...]:
    """An error that names the states whose digests differ; none when all agree."""
    wrong, num_states = read.differing(), len(read.subject.names)
    if not wrong:
        return ()
    more = [f"and {len(wrong) - MAX_LISTED} more"] if len(wrong) > MAX_LISTED else []
    error = TransferError(
        Reason.DIGEST,
        f"the received bytes differ from those of {key}",
        found=f"{len(wrong)} of {num_states} states differ: {', '.join([*wrong[:MAX_LISTED], *more])}",
        hint="wrong blocks or a faulty transport: try another --transport to tell which",
    )
    return (error,)
