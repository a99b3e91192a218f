"""Leases of requests that wait in our engine's queue: they are renewed, so that no cache is lost by waiting."""

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
    """By reference, since two sources may give the same id to a lease. One ends when its cache is fetched or released,
    or after `hold_s` seconds: a lost request must not keep a source's blocks for ever."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._leases: dict[Reference, _QueuedLease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def add(self, wanted: HoldRequest, now: float) -> None:
        """Keep a lease alive from now on. A repeated request changes nothing."""
        hold = _QueuedLease(peers_of(wanted.reference, wanted.addresses), now + self._hold_s)
        self._leases.setdefault(wanted.reference, hold)

    def end(self, reference: Reference) -> None:
        """From now on its fetch renews it, or nobody does. Unknown references are ignored."""
        self._leases.pop(reference, None)

    def expire(self, now: float) -> None:
        """End those that have been held for too long."""
        self._leases = {reference: hold for reference, hold in self._leases.items() if hold.until > now}

    def leases(self) -> Iterator[tuple[PeerKey, str]]:
        """Every lease that is kept alive, with the source rank that has it."""
        for reference, hold in self._leases.items():
            for key in hold.peers:
                yield key, reference.lease_id
