"""Readers that have their bytes: a source says whether these are the request's own, and what they look like at home."""

from __future__ import annotations

from kvferry.errors import FerryError
from kvferry.plan.extract import Extractor
from kvferry.session.events import ClaimKey, Command, Digest, Digested, Reply
from kvferry.session.lease import Lease
from kvferry.session.leases import Leases
from kvferry.session.refusals import refuse, unknown_lease
from kvferry.wire.messages import Landed, Reason, Refusal, Renewed, Valid

__all__ = ["Landings"]


class Landings:
    """Of one rank's leases; a lease of which all readers have their bytes is done."""

    def __init__(self, leases: Leases, extractor: Extractor) -> None:
        self._leases = leases
        self._extractor = extractor

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
        """Whom we have written everything to need not ask."""
        commands = []
        for key, write in lease.writes.items():
            is_told = key.party in lease.completed or key in lease.digesting
            if lease.live and write.is_written and not is_told:
                commands += self._answer(write.peer, key, lease, now)
        return commands

    def _answer(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        if lease.claims[key.party].subject.parts:
            return self._digest(peer, key, lease, now)
        return self._complete(peer, key, lease, (), now)

    def _digest(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        """Look at our own blocks before the answer. A repeated question is told that somebody is here."""
        if key in lease.digesting:
            lease.digesting[key] = peer
            return [Reply(peer, Renewed(()))]
        try:
            wanted, subject = lease.wanted, lease.claims[key.party].subject
            extracts = self._extractor.extracts(subject, wanted.block_tables, wanted.num_tokens)
        except FerryError as error:
            return refuse(peer, Refusal(Reason.OUT_OF_RANGE, error.what, error.found, error.expected, key.claim_id))
        lease.digesting[key] = peer
        self._leases.renew(lease, now)
        return [Digest(key, extracts)]

    def digested(self, event: Digested, now: float) -> list[Command]:
        """Only of a lease that is still live: else it is not known whose bytes those were, and the reader has been told
        when it ended."""
        key = event.key
        lease = self._leases.get(key.lease_id) if isinstance(key, ClaimKey) else None
        if lease is None or not isinstance(key, ClaimKey) or key not in lease.digesting:
            return []
        peer = lease.digesting.pop(key)
        if event.error:
            return refuse(peer, Refusal(Reason.DIGEST, "no digest can be made", event.error, "", key.claim_id))
        return self._complete(peer, key, lease, event.values, now)

    def _complete(
        self, peer: str, key: ClaimKey, lease: Lease, digests: tuple[bytes, ...], now: float
    ) -> list[Command]:
        """One reader has its bytes; when all have, the blocks are free."""
        lease.complete(key.party, digests)
        told: list[Command] = [Reply(peer, Valid(key.claim_id, digests))]
        if lease.finished:
            return [*told, *self._leases.end(lease, "all readers valid", "done", now)]
        self._leases.renew(lease, now)
        return told
