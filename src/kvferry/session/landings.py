"""Readers that have their bytes: a source says whether these are the request's own, and what they look like at home.

That is looked at while the bytes move, so that nobody has to wait for it. What happens to the blocks after that, until
the reader has its bytes, comes out as well: the reader's digest is another one then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf

from kvferry.errors import FerryError
from kvferry.plan.extract import Extract, Extractor
from kvferry.session.events import ClaimKey, Command, Digest, Digested, Reply
from kvferry.session.lease import Lease
from kvferry.session.leases import Leases
from kvferry.session.refusals import refuse, unknown_lease
from kvferry.wire.messages import Landed, Party, Reason, Refusal, Renewed, Valid

__all__ = ["Landings"]

LOOK_AFTER_S = 0.001


class Landings:
    """Of one rank's leases; a lease of which all readers have their bytes is done."""

    def __init__(self, leases: Leases, extractor: Extractor) -> None:
        self._leases = leases
        self._extractor = extractor
        # When what is looked at, oldest first.
        self._begun: dict[ClaimKey, float] = {}

    def begun(self, lease: Lease, party: Party, now: float) -> None:
        """Bytes are on their way to a reader: soon `prepare` will look at what it is going to have.

        At once would be too early: the word that they may come is still to be sent.
        """
        granted = lease.claims[party]
        key = ClaimKey(lease.wanted.lease_id, party, granted.claim_id)
        # Until all of it is computed, the blocks change.
        if granted.subject.parts and lease.is_computed and not lease.is_looked_at(key):
            self._begun.setdefault(key, now + LOOK_AFTER_S)

    def next_deadline(self) -> float:
        """When `prepare` has something to do; infinity when there is nothing."""
        return next(iter(self._begun.values()), inf)

    def prepare(self, now: float) -> list[Command]:
        """Begin the digests for which readers will ask before long."""
        due = [key for key, at in self._begun.items() if at <= now]
        for key in due:
            del self._begun[key]
        return [command for key in due for command in self._prepare(key)]

    def _prepare(self, key: ClaimKey) -> Iterator[Command]:
        lease = self._leases.get(key.lease_id)
        if lease is None or not lease.live or key.party in lease.completed or lease.is_looked_at(key):
            return
        # What is wrong is said when the reader asks.
        with suppress(FerryError):
            extracts = self._extracts(key, lease)
            lease.digesting[key] = ""
            yield Digest(key, extracts)

    def _extracts(self, key: ClaimKey, lease: Lease) -> tuple[Extract, ...]:
        subject, wanted = lease.claims[key.party].subject, lease.wanted
        return self._extractor.extracts(subject, wanted.block_tables, wanted.num_tokens)

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
            is_told = key.party in lease.completed or lease.digesting.get(key)
            if lease.live and write.is_written and not is_told:
                commands += self._answer(write.peer, key, lease, now)
        return commands

    def _answer(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        if key in lease.digested:
            return self._complete(peer, key, lease, lease.digested.pop(key), now)
        if lease.claims[key.party].subject.parts:
            return self._digest(peer, key, lease, now)
        return self._complete(peer, key, lease, (), now)

    def _digest(self, peer: str, key: ClaimKey, lease: Lease, now: float) -> list[Command]:
        """Look at our own blocks before the answer. A repeated question is told that somebody is here."""
        if key in lease.digesting:
            is_repeated = bool(lease.digesting[key])
            lease.digesting[key] = peer
            if is_repeated:
                return [Reply(peer, Renewed(()))]
            self._leases.renew(lease, now)
            return []
        try:
            extracts = self._extracts(key, lease)
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
        if not peer:
            if not event.error:
                lease.digested[key] = event.values
            return []
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
