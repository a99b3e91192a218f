"""Verification of what has landed: both sides digest it, and the fetch fails if the digests differ."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import MAX_LISTED, FerryError, TransferError
from kvferry.plan.description.layout import Layout
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import DigestPolicy, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Command, Digest, Send
from kvferry.session.events import FetchRequest
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.bindings import Binding
from kvferry.session.target.reads.fetch import Fetch, Read
from kvferry.wire.messages import Landed, Party, Reason


class Verifier:
    """Asks the source to confirm what has landed, and has it digested here meanwhile."""

    def __init__(self, ours: Party, layout: Layout, policy: DigestPolicy) -> None:
        self.policy = policy
        self._ours = ours
        self._extractor = Extractor(layout, "target")

    def landed_of(self, fetch: Fetch) -> Landed:
        """The question whether what has landed is valid."""
        wanted = fetch.wanted
        return Landed(self._ours, wanted.claim_id, wanted.reference.lease_id)

    def subjects(self, wanted: FetchRequest, binding: Binding) -> dict[PeerKey, Subject]:
        """What is to be digested of each read. Raises TransferError when it cannot be described."""
        try:
            return {peer: binding.subject(peer, wanted, self.policy) for peer in binding.programs}
        except FerryError as error:
            raise digest_error(str(error)) from error

    def prepare(self, fetch: Fetch, peer: PeerKey) -> None:
        """Find out where its bytes lie here, once; this is done while answers are awaited, when it delays nothing.

        Raises TransferError when it cannot be digested.
        """
        read, wanted = fetch.reads[peer], fetch.wanted
        if read.is_prepared:
            return
        try:
            read.extracts = self._extractor.extracts(read.subject, wanted.block_tables, wanted.num_tokens)
        except FerryError as error:
            raise digest_error(str(error)) from error
        read.is_prepared = True

    def ask(self, fetch: Fetch, peer: PeerKey) -> Iterator[Command]:
        """Ask whether the bytes are valid, unless the source knows by itself when to say so, and digest them meanwhile.
        Raises what `prepare` raises."""
        self.prepare(fetch, peer)
        read = fetch.reads[peer]
        if read.direction is Direction.READ:
            yield Send(peer, self.landed_of(fetch))
        if read.extracts:
            yield Digest(fetch.key(peer), read.extracts)
        else:
            read.machine.move("digested")
        if read.is_confirmed:
            read.machine.move("valid")


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
