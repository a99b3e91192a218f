"""Readers that have all their bytes: the source confirms that its lease was live, and sends its own digest of them.

A sampled digest is made while the bytes move, so that nobody waits for it: in the turn after the grant was sent, since
later it would take a core from a copy that is well under way. If the blocks change after that and before
they are read, the reader's digest differs. A full digest is made when a reader asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from kvferry.errors import FerryError, TransferError
from kvferry.plan.digests.extractor import Extractor
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Command, Digest, Reply
from kvferry.session.events import Digested
from kvferry.session.keys import ClaimKey
from kvferry.session.refusals import refuse, unknown_lease
from kvferry.session.source.lease import Lease, OwnDigest
from kvferry.session.source.lease_table import LeaseTable
from kvferry.wire.messages import Landed, Party, Reason, Renewed, Valid


class CompletedReads:
    """Confirms the completed reads of one rank's leases. A lease is done when all its readers have their bytes."""

    def __init__(self, leases: LeaseTable, extractor: Extractor) -> None:
        self._leases = leases
        self._extractor = extractor
        # Reads whose digests are to be made, oldest first.
        self._started: dict[ClaimKey, None] = {}

    def started(self, lease: Lease, party: Party) -> None:
        """Bytes are in flight to a reader: `prepare` will make the digest of them.

        It makes one only once everything is computed, because until then the blocks change; and only for samples,
        because a full digest is as much work as the transfer, and digests that readers have asked for go first.
        """
        granted = lease.claims[party]
        key = ClaimKey(lease.request.lease_id, party, granted.claim_id)
        is_sampled = granted.subject.policy is DigestPolicy.SAMPLED and granted.subject.parts
        if is_sampled and lease.is_computed and key not in lease.digests:
            self._started[key] = None

    @property
    def has_started(self) -> bool:
        """Whether `prepare` has something to do."""
        return bool(self._started)

    def prepare(self) -> list[Command]:
        """Begin the digests for which readers will ask soon."""
        started, self._started = self._started, {}
        return [command for key in started for command in self._prepare(key)]

    def _prepare(self, key: ClaimKey) -> Iterator[Command]:
        lease = self._leases.get(key.lease_id)
        is_wanted = lease is not None and lease.live and lease.has_granted(key.party, key.claim_id)
        if lease is None or not is_wanted or key.party in lease.completed or key in lease.digests:
            return
        # An error is reported when the reader asks.
        with suppress(FerryError):
            yield self._begin(key, lease)

    def _begin(self, key: ClaimKey, lease: Lease) -> Digest:
        subject, request = lease.claims[key.party].subject, lease.request
        extracts = self._extractor.extracts(subject, request.block_tables, request.num_tokens)
        lease.digests[key] = OwnDigest()
        return Digest(key, extracts)

    def landed(self, peer: str, landed: Landed, now: float) -> list[Command]:
        """A reader asks whether it may use what has landed. Raises FerryError where it must not."""
        lease = self._leases.get(landed.lease_id)
        if lease is None:
            raise unknown_lease(landed.lease_id)
        lease.check_landed(landed)
        if landed.party in lease.completed:
            digests, first = lease.completed[landed.party], lease.first_token_for(landed.party)
            return [Reply(peer, Valid(landed.claim_id, digests, first))]
        return self._answer(peer, ClaimKey(landed.lease_id, landed.party, landed.claim_id), lease, now)

    def written(self, lease: Lease, now: float) -> list[Command]:
        """Confirm writes that have ended. A reader that reads a share itself asks for this."""
        commands = []
        for key, write in lease.writes.items():
            if lease.claims[key.party].direction is Direction.READ:
                continue
            is_answered = key.party in lease.completed or (key in lease.digests and lease.digests[key].peer)
            if lease.live and write.is_written and not is_answered:
                commands += self._answer(write.peer, key, lease, now)
        return commands

    def _answer(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        if lease.claims[key.party].subject.parts:
            return self._digest(peer, key, lease, now)
        return self._complete(peer, key, lease, (), now)

    def _digest(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        """Digest our own blocks before the answer. Meanwhile a repeated question is answered, to show that we are
        alive."""
        digest = lease.digests.get(key)
        if digest is not None and digest.values is not None:
            return self._complete(peer, key, lease, digest.values, now)
        commands: list[Command] = [Reply(peer, Renewed(()))] if digest is not None and digest.peer else []
        if digest is None:
            try:
                commands = [self._begin(key, lease)]
            except FerryError as error:
                return refuse(peer, error, key.claim_id)
        lease.digests[key].peer = peer
        self._leases.renew(lease, now)
        return commands

    def digested(self, event: Digested, now: float) -> list[Command]:
        """A digest is there. It counts only while the lease is live: else the blocks may have had other bytes, and the
        reader was told when the lease ended."""
        key = event.key
        lease = self._leases.get(key.lease_id) if isinstance(key, ClaimKey) else None
        if lease is None or not isinstance(key, ClaimKey) or key not in lease.digests:
            return []
        digest = lease.digests[key]
        if event.error:
            # It is tried again when a reader asks again.
            del lease.digests[key]
            error = TransferError(Reason.DIGEST, "no digest can be made", found=event.error)
            return refuse(digest.peer, error, key.claim_id) if digest.peer else []
        digest.values = event.values
        return self._complete(digest.peer, key, lease, event.values, now) if digest.peer else []

    def _complete(
        self, peer: str, key: ClaimKey, lease: Lease, digests: tuple[bytes, ...], now: float
    ) -> list[Command]:
        """One reader has its bytes. When all have, the lease is done."""
        lease.complete(key.party, digests)
        lease.digests.pop(key, None)
        commands: list[Command] = [Reply(peer, Valid(key.claim_id, digests, lease.first_token_for(key.party)))]
        if lease.finished:
            return [*commands, *self._leases.end(lease, "all readers valid", "done", now)]
        self._leases.renew(lease, now)
        return commands
