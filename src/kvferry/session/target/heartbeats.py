"""Heartbeats: they keep leases alive that a target uses, or is going to use.

How long a peer may be silent is in `kvferry.session.timeouts`; the session takes it for lost then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvferry.session.commands import Send
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import Handshakes
from kvferry.session.target.queued_leases import QueuedLeases
from kvferry.session.target.reads.fetch import LEASED, Fetch
from kvferry.session.timeouts import Timing
from kvferry.wire.messages import Party, Renew


class Heartbeats:
    """One message per peer at each heartbeat, with all its leases."""

    def __init__(
        self, ours: Party, peers: Handshakes, fetches: Mapping[str, Fetch], queued: QueuedLeases, timing: Timing
    ) -> None:
        self._ours = ours
        self._peers = peers
        self._fetches = fetches
        self._queued = queued
        self._timing = timing
        self._last = 0.0

    def send(self, now: float) -> Iterator[Send]:
        """Renew the leases of reads and of queued requests, if it is time."""
        if now - self._last < self._timing.heartbeat_s:
            return
        self._last = now
        by_peer: dict[PeerKey, list[str]] = {}
        for key, lease_id in (*self._used(), *self._held(), *self._unclaimed()):
            by_peer.setdefault(key, []).append(lease_id)
        for key, lease_ids in by_peer.items():
            yield Send(key, Renew(self._ours, tuple(lease_ids)))

    def _used(self) -> Iterator[tuple[PeerKey, str]]:
        for fetch in self._fetches.values():
            for key, read in fetch.reads.items():
                if read.state in LEASED:
                    yield key, fetch.wanted.reference.lease_id

    def _held(self) -> Iterator[tuple[PeerKey, str]]:
        for key, lease_id in self._queued.leases():
            if key in self._peers and self._peers[key].ready:
                yield key, lease_id

    def _unclaimed(self) -> Iterator[tuple[PeerKey, str]]:
        """Leases that will be claimed once a transport to the source is found, which on a busy machine can take longer
        than a lease lasts."""
        for fetch in self._fetches.values():
            for key in fetch.peers:
                if not fetch.reads and not fetch.failed and key in self._peers and self._peers[key].offer is not None:
                    yield key, fetch.wanted.reference.lease_id
