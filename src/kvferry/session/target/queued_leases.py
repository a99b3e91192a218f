"""Leases of requests that wait at our engine for their turn: renewed, so that a queue is no reason to lose a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.session.events import HoldRequest
from kvferry.session.keys import PeerKey, peers_of
from kvferry.wire.messages import Reference


@dataclass(frozen=True, slots=True)
class _QueuedLease:
    peers: tuple[PeerKey, ...]
    until: float


class QueuedLeases:
    """By reference: the id of a lease is its source's own affair. One ends when its cache is fetched or released, or
    after `hold_s` seconds: a lost request must not keep a source's blocks for ever."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._leases: dict[Reference, _QueuedLease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def add(self, wanted: HoldRequest, now: float) -> None:
        """Hold a lease from now on; again changes nothing."""
        hold = _QueuedLease(peers_of(wanted.reference, wanted.addresses), now + self._hold_s)
        self._leases.setdefault(wanted.reference, hold)

    def end(self, reference: Reference) -> None:
        """Its fetch renews it from now on, or nobody does. Unknown ones are fine."""
        self._leases.pop(reference, None)

    def expire(self, now: float) -> None:
        """End those that have been held for too long."""
        self._leases = {reference: hold for reference, hold in self._leases.items() if hold.until > now}

    def leases(self) -> Iterator[tuple[PeerKey, str]]:
        """What is held where."""
        for reference, hold in self._leases.items():
            for key in hold.peers:
                yield key, reference.lease_id
