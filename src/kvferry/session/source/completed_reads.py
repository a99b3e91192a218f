"""Readers that have their bytes: a source says whether these are the request's own, and what they look like at home.

A sample is made while the bytes move, so that nobody has to wait for it. What happens to the blocks between that and
the reading comes out as well: the reader's digest is another one then. A full digest is made when a reader asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf

from kvferry.errors import FerryError
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Command, Digest, Reply
from kvferry.session.events import Digested
from kvferry.session.keys import ClaimKey
from kvferry.session.refusals import refuse, unknown_lease
from kvferry.session.source.lease import Lease, OwnDigest
from kvferry.session.source.lease_table import LeaseTable
from kvferry.wire.messages import Landed, Party, Reason, Refusal, Renewed, Valid

# A digest at once would hold up the word that the bytes may come, which another thread is about to send.
LOOK_AFTER_S = 0.001


class CompletedReads:
    """Of one rank's leases; a lease of which all readers have their bytes is done."""

    def __init__(self, leases: LeaseTable, extractor: Extractor) -> None:
        self._leases = leases
        self._extractor = extractor
        # When what is looked at, oldest first.
        self._started: dict[ClaimKey, float] = {}

    def started(self, lease: Lease, party: Party, now: float) -> None:
        """Bytes are on their way to a reader: soon `prepare` will look at what it is going to have.

        Not before all of it is computed, for until then the blocks change; and not at all of it, for that is as much
        work as the transfer, and those that are asked for go first.
        """
        granted = lease.claims[party]
        key = ClaimKey(lease.wanted.lease_id, party, granted.claim_id)
        is_sampled = granted.subject.policy is DigestPolicy.SAMPLED and granted.subject.parts
        if is_sampled and lease.is_computed and key not in lease.digests:
            self._started.setdefault(key, now + LOOK_AFTER_S)

    def next_deadline(self) -> float:
        """When `prepare` has something to do; infinity when there is nothing."""
        return next(iter(self._started.values()), inf)

    def prepare(self, now: float) -> list[Command]:
        """Begin the digests for which readers will ask before long."""
        due = [key for key, at in self._started.items() if at <= now]
        for key in due:
            del self._started[key]
        return [command for key in due for command in self._prepare(key)]

    def _prepare(self, key: ClaimKey) -> Iterator[Command]:
        lease = self._leases.get(key.lease_id)
        is_wanted = lease is not None and lease.live and lease.has_granted(key.party, key.claim_id)
        if lease is None or not is_wanted or key.party in lease.completed or key in lease.digests:
            return
        # What is wrong is said when the reader asks.
        with suppress(FerryError):
            yield self._begin(key, lease)

    def _begin(self, key: ClaimKey, lease: Lease) -> Digest:
        subject, wanted = lease.claims[key.party].subject, lease.wanted
        extracts = self._extractor.extracts(subject, wanted.block_tables, wanted.num_tokens)
        lease.digests[key] = OwnDigest()
        return Digest(key, extracts)

    def landed(self, peer: str, landed: Landed, now: float) -> list[Command]:
        """A reader asks whether it may use what it has."""
        lease = self._leases.get(landed.lease_id)
        if lease is None:
            return refuse(peer, unknown_lease(landed))
        for refusal in lease.refusal_of_landed(landed):
            return refuse(peer, refusal)
        if landed.party in lease.completed:
            return [Reply(peer, Valid(landed.claim_id, lease.completed[landed.party]))]
        return self._answer(peer, ClaimKey(landed.lease_id, landed.party, landed.claim_id), lease, now)

    def written(self, lease: Lease, now: float) -> list[Command]:
        """Whom we have written everything to need not ask; who reads a share of it does."""
        commands = []
        for key, write in lease.writes.items():
            if lease.claims[key.party].direction is Direction.READ:
                continue
            note_reached = key.party in lease.completed or (key in lease.digests and lease.digests[key].peer)
            if lease.live and write.is_written and not note_reached:
                commands += self._answer(write.peer, key, lease, now)
        return commands

    def _answer(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        if lease.claims[key.party].subject.parts:
            return self._digest(peer, key, lease, now)
        return self._complete(peer, key, lease, (), now)

    def _digest(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        """Look at our own blocks before the answer. A repeated question is told that somebody is here."""
        digest = lease.digests.get(key)
        if digest is not None and digest.values is not None:
            return self._complete(peer, key, lease, digest.values, now)
        commands: list[Command] = [Reply(peer, Renewed(()))] if digest is not None and digest.peer else []
        if digest is None:
            try:
                commands = [self._begin(key, lease)]
            except FerryError as error:
                return refuse(peer, Refusal(Reason.OUT_OF_RANGE, error.what, error.found, error.expected, key.claim_id))
        lease.digests[key].peer = peer
        self._leases.renew(lease, now)
        return commands

    def digested(self, event: Digested, now: float) -> list[Command]:
        """Only of a lease that is still live: else it is not known whose bytes those were, and the reader has been told
        when it ended."""
        key = event.key
        lease = self._leases.get(key.lease_id) if isinstance(key, ClaimKey) else None
        if lease is None or not isinstance(key, ClaimKey) or key not in lease.digests:
            return []
        digest = lease.digests[key]
        if event.error:
            # Whoever asks later has it tried again.
            del lease.digests[key]
            refusal = Refusal(Reason.DIGEST, "no digest can be made", event.error, "", key.claim_id)
            return refuse(digest.peer, refusal) if digest.peer else []
        digest.values = event.values
        return self._complete(digest.peer, key, lease, event.values, now) if digest.peer else []

    def _complete(
        self, peer: str, key: ClaimKey, lease: Lease, digests: tuple[bytes, ...], now: float
    ) -> list[Command]:
        """One reader has its bytes; when all have, the blocks are free."""
        lease.complete(key.party, digests)
        lease.digests.pop(key, None)
        told: list[Command] = [Reply(peer, Valid(key.claim_id, digests))]
        if lease.finished:
            return [*told, *self._leases.end(lease, "all readers valid", "done", now)]
        self._leases.renew(lease, now)
        return told
