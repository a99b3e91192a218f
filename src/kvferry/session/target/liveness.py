"""Liveness of sources, and the leases that they keep for us.

A source counts as lost when it has been silent for `Timing.silence_s` while a read needs it, and at once when nobody
listens at its address any more, or one read after the other fails. One from which nothing has been fetched for
`idle_peer_s` is forgotten. Heartbeats keep leases alive that are used or going to be used, also those of requests that
wait in the engine's queue. While a read makes no progress they are as long as frames of the network: a source that only
short messages reach is silent then. Where they are lost, what follows them on their connection waits for them: a source
that moves the bytes itself has time to notice that it cannot, and to say so, before heartbeats to it are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvferry.errors import TransferError
from kvferry.session.commands import CheckLiveness, Send
from kvferry.session.events import HoldRequest
from kvferry.session.keys import PeerKey, peers_of
from kvferry.session.target.peers.handshakes import Handshakes, PeerLost, Step
from kvferry.session.target.peers.peer import Peer
from kvferry.session.target.reads.fetch import LEASED, Fetch, FetchBroken, Read, is_needed, needed_peers
from kvferry.session.timing import Timing
from kvferry.wire.messages import MAX_PADDING_BYTES, Party, Reason, Reference, Renew, Renewed

# A lost source is met again for leases of waiting requests, each time after so many heartbeats.
LOST_HEARTBEATS = 5
MAY_COME_BACK = (Reason.PEER_LOST, Reason.DEADLINE, Reason.TRANSPORT)
# Each heartbeat is answered: after two without an answer it is checked whether the source's process has ended.
QUIET_HEARTBEATS = 2
PADDING = bytes(MAX_PADDING_BYTES)
MAX_FAILED_READS = 3


class Liveness:
    """Watches the sources that a rank has met. `queued` has the leases of waiting requests by reference, since two
    sources may give the same id to a lease, and when each renewal ends: lost requests must not keep blocks for ever."""

    def __init__(self, ours: Party, peers: Handshakes, fetches: Mapping[str, Fetch], timing: Timing) -> None:
        self._ours = ours
        self._peers = peers
        self._fetches = fetches
        self._timing = timing
        self._last_sent = 0.0
        # Before this nobody has been idle for long enough.
        self.next_idle_s = 0.0
        self.queued: dict[Reference, tuple[HoldRequest, float]] = {}
        # Until when each lost source is left alone.
        self._lost: dict[PeerKey, float] = {}
        # Whose last heartbeat was long, and when each last answered one, or got the first.
        self._stalled: dict[PeerKey, float] = {}

    def hold(self, request: HoldRequest, now: float) -> None:
        """Keep the lease of a queued request alive for at most `hold_s`. A repeated request changes nothing."""
        self.queued.setdefault(request.reference, (request, now + self._timing.hold_s))

    def fetched(self, reference: Reference) -> None:
        """Stop renewing a queued lease: from now on its fetch does, or nobody. Unknown references are ignored."""
        self.queued.pop(reference, None)

    def watch(self, now: float) -> Iterator[Step]:
        """Repeat what is not answered, and give up peers that stay silent. Peers that have nothing to answer are not
        looked at before one of them may have been idle for long enough."""
        for peer in self._peers.meeting:
            yield from self._peers.repeat(peer, now)
        for key in needed_peers(self._fetches):
            if key in self._peers and self._peers[key].ready:
                yield from self._watch(self._peers[key], now)
        if now >= self.next_idle_s:
            yield from self._forget_idle(now)

    def _watch(self, peer: Peer, now: float) -> Iterator[Step]:
        silent_s = now - peer.last_heard
        if silent_s > QUIET_HEARTBEATS * self._timing.heartbeat_s and now - peer.last_sent >= self._timing.resend_s:
            peer.last_sent = now
            yield CheckLiveness(peer.key)
        if silent_s > self._timing.silence_s:
            yield _lost(peer.key, f"{peer.key} has not answered for {self._timing.silence_s:g} s")
        elif now - self._stalled.get(peer.key, now) > self._timing.silence_s:
            what = f"{peer.key} has answered nothing long for {self._timing.silence_s:g} s, only short messages"
            yield _lost(peer.key, what, "does the network between both lose long packets? compare the MTU of its parts")

    def _forget_idle(self, now: float) -> Iterator[Step]:
        used = {key for fetch in self._fetches.values() for key in fetch.peers}
        for peer in self._peers:
            if peer.ready and now >= peer.last_heard + self._timing.idle_peer_s and peer.key not in used:
                # It may be gone for good; if not, the next fetch begins a new handshake.
                yield _lost(peer.key, f"{peer.key} was idle")
        # Whoever is met or heard of later is idle later.
        first_s = min((peer.last_heard for peer in self._peers), default=now) + self._timing.idle_peer_s
        # One that is in use although it has said nothing for long may be idle soon.
        self.next_idle_s = first_s if first_s > now else now + self._timing.heartbeat_s

    def lost(self, peer: PeerLost, now: float) -> None:
        """Note a lost source, to meet it again: it may have paused, and still keep what waiting requests need."""
        if peer.error.reason in MAY_COME_BACK:
            self._leave_alone(peer.peer, now)

    def _leave_alone(self, key: PeerKey, now: float) -> None:
        if self.queued:
            self._lost[key] = now + LOST_HEARTBEATS * self._timing.heartbeat_s

    def meet_again(self, now: float) -> Iterator[Step]:
        """Begin anew with lost sources of waiting requests."""
        due = [key for key, until in self._lost.items() if until <= now]
        if not due:
            return
        wanted = {key for reference, (held, _) in self.queued.items() for key in peers_of(reference, held.addresses)}
        for key in due:
            del self._lost[key]
            if key in wanted:
                yield from self._peers.greet(key, now)

    def read_failed(self, key: PeerKey, began: float, error: str, now: float) -> Iterator[Step | FetchBroken]:
        """Begin anew with a source from which one read after the other fails: perhaps another transport works.

        `began` is when the read's fetch did. Reads that were under way together fail together, which counts once.
        """
        if key not in self._peers or began < self._peers[key].last_failed:
            return
        peer = self._peers[key]
        peer.num_failed_reads, peer.last_failed = peer.num_failed_reads + 1, now
        if peer.num_failed_reads < MAX_FAILED_READS:
            return
        what = f"{MAX_FAILED_READS} reads from {key} have failed, one after the other"
        wrong = TransferError(Reason.TRANSPORT, what, found=error)
        # It lives: it is told of each before it is forgotten.
        for fetch in list(self._fetches.values()):
            if key in fetch.peers and not fetch.failed:
                yield FetchBroken(fetch, wrong)
        yield PeerLost(key, wrong)

    def gone(self, key: PeerKey) -> Iterator[Step]:
        """Nobody listens at the address of a peer. One that is not needed may still be met again."""
        if key in self._peers and (not self._peers[key].ready or is_needed(key, self._fetches)):
            yield PeerLost(key, absent(key))

    def silent(self, key: PeerKey, now: float) -> Iterator[Step]:
        """The host of a peer does not answer attempts to connect. It may do so, and still serve those who are
        connected: one that was met before is lost only if it has said nothing for a while, either."""
        if key not in self._peers:
            return
        peer = self._peers[key]
        silent_s = now - peer.last_heard
        if peer.ready and is_needed(key, self._fetches) and silent_s > QUIET_HEARTBEATS * self._timing.heartbeat_s:
            what = f"nothing answers at {key.address}, and {key} has said nothing for {silent_s:.1f} s"
            yield _lost(key, what, "is that host up?")
        elif not (peer.ready or peer.machine.allows("refused")):
            # The network may be mended before the leases end.
            self._leave_alone(key, now)
            yield PeerLost(key, silent(key))

    def refused(self, key: PeerKey, now: float) -> Iterator[Step]:
        """Whoever listens at the address of a peer does not let us in."""
        if key in self._peers and not self._peers[key].ready:
            self._leave_alone(key, now)
            yield PeerLost(key, stranger(key))

    def renew(self, now: float) -> Iterator[Send]:
        """One message per peer at each heartbeat, with all its leases."""
        self.queued = {reference: (held, until) for reference, (held, until) in self.queued.items() if until > now}
        if now - self._last_sent < self._timing.heartbeat_s:
            return
        self._last_sent = now
        by_peer: dict[PeerKey, list[str]] = {}
        for key, lease_id in (*self._used(), *self._held(), *self._unclaimed()):
            by_peer.setdefault(key, []).append(lease_id)
        reads = [item for fetch in self._fetches.values() for item in fetch.reads.items()]
        stalled = [key for key, read in reads if read.is_stalled(now, self._patience_s(read))]
        self._stalled = {key: self._stalled.get(key, now) for key in stalled}
        for key, lease_ids in by_peer.items():
            yield Send(key, Renew(self._ours, tuple(lease_ids), PADDING if key in self._stalled else b""))

    def _patience_s(self, read: Read) -> float:
        """How long no bytes of a read may come before heartbeats to its source are long."""
        return self._timing.fence_s if read.is_moved_by_source else self._timing.heartbeat_s

    def renewed(self, key: PeerKey, renewed: Renewed, now: float) -> None:
        """Note a long answer: bytes of this source can arrive."""
        if renewed.padding and key in self._stalled:
            self._stalled[key] = now

    def _used(self) -> Iterator[tuple[PeerKey, str]]:
        for fetch in self._fetches.values():
            for key, read in fetch.reads.items():
                if read.state in LEASED:
                    yield key, fetch.request.reference.lease_id

    def _held(self) -> Iterator[tuple[PeerKey, str]]:
        for reference, (held, _) in self.queued.items():
            for key in peers_of(reference, held.addresses):
                if key in self._peers and self._peers[key].ready:
                    yield key, reference.lease_id

    def _unclaimed(self) -> Iterator[tuple[PeerKey, str]]:
        """Leases that will be claimed once a transport to the source is found, which on a busy machine can take longer
        than a lease lasts."""
        for fetch in self._fetches.values():
            for key in fetch.peers:
                if not fetch.reads and not fetch.failed and key in self._peers and self._peers[key].offer is not None:
                    yield key, fetch.request.reference.lease_id


def absent(key: PeerKey) -> TransferError:
    """Nobody listens at the address of a peer."""
    what = f"nothing listens at {key.address}" + (" any more" if key.epoch else "")
    return TransferError(Reason.PEER_LOST, what, hint="has that engine exited?")


def silent(key: PeerKey) -> TransferError:
    """The host of a peer does not answer attempts to connect."""
    hint = "is that host up, is this its address, and does a firewall let the port through?"
    return TransferError(Reason.UNREACHABLE, f"nothing answers at {key.address}", hint=hint)


def stranger(key: PeerKey) -> TransferError:
    """Whoever listens at the address of a peer has ended the handshake of our connection."""
    what = f"whoever listens at {key.address} has ended the handshake"
    hint = "do both engines have the same --token-file, and is this the port of an engine's control channel?"
    return TransferError(Reason.UNREACHABLE, what, hint=hint)


def _lost(key: PeerKey, what: str, hint: str = "") -> PeerLost:
    return PeerLost(key, TransferError(Reason.PEER_LOST, what, hint=hint))
