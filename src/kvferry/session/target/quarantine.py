"""Fetches that have failed: engine and sources are told, and the blocks stay until nothing can write to them.

Blocks to which a source may still write must not be used by anybody else, so they wait until it acknowledges the abort.
Silence proves nothing, since a process that was stopped continues where it was. One of these does prove that it writes
no more:

* the source acknowledges, which means that no ticket of the claim is open;
* another incarnation answers at its address, or its host says that nobody listens there: then its process has ended;
* it wrote by access of its own, and that has been revoked, as it is when the source is lost. It may still not know that
  its claims are aborted, so it gets no access again before it has acknowledged that.

Bytes that were sent before may still be in the buffers of a transport, unless the write ended well. After anything else
the blocks wait for `fence_s` more.

In a network that loses long packets, a long message that was sent before keeps back what follows it on its connection,
the abort, too. So one that is not answered for `fence_s` is sent over a new connection. The source may just be busy,
and need more than that: its time doubles with each connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvferry.errors import TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.session import commands as c
from kvferry.session.events import FetchRequest
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey
from kvferry.session.target.peers.handshakes import Handshakes
from kvferry.session.target.reads.fetch import Fetch, Read, ReadState
from kvferry.session.timing import Timing
from kvferry.wire.messages import Abort, Aborted, Party


@dataclass(slots=True)
class _PendingAbort:
    """An abort that was sent to a source. With `is_exposed` the source may still write, for all it knows; by `access`,
    where that can be revoked, and once it `is_revoked` nothing of it arrives. `fence_s` is how long blocks still have
    to wait, from `fenced_at` on: for ever until the source has acknowledged or its process has ended. The connection
    since `connected_at` is replaced after `patience_s`."""

    abort: Abort
    first_sent: float
    last_sent: float
    is_exposed: bool
    connected_at: float
    patience_s: float
    access: Party | None = None
    is_revoked: bool = False
    fence_s: float = inf
    fenced_at: float = 0.0

    def replaces_connection(self, now: float) -> bool:
        """Whether it is due to be sent over a new connection, which is said once for each."""
        if now - self.connected_at < self.patience_s:
            return False
        self.connected_at, self.patience_s = now, 2 * self.patience_s
        return True

    def fence(self, fence_s: float, now: float) -> None:
        """No acknowledgement is needed any more. If this is repeated, the first time counts."""
        if fence_s < self.fence_s:
            self.fence_s, self.fenced_at = fence_s, now


class PendingAborts:
    """Aborts that a source has not acknowledged yet: sent again until it does, or until it counts as silent."""

    def __init__(self, ours: Party, peers: Handshakes, timing: Timing) -> None:
        self._ours = ours
        self._peers = peers
        self._timing = timing
        self._open: dict[ReadKey, _PendingAbort] = {}
        self._last_turn = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def send(self, request: FetchRequest, key: PeerKey, read: Read | None, now: float) -> Iterator[c.Send]:
        """Tell a source that its blocks are not wanted any more, of which nothing or a `read` was claimed; one that has
        been lost only if it may still write."""
        is_exposed = read is not None and read.is_exposed
        if is_exposed or key in self._peers:
            abort = Abort(self._ours, request.claim_id, request.reference.lease_id)
            access = read.access if read is not None and is_exposed else None
            pending = _PendingAbort(abort, now, now, is_exposed, now, self._timing.fence_s, access)
            self._open[ReadKey(request.claim_id, key)] = pending
            yield c.Send(key, abort)

    def awaits(self, peer: PeerKey) -> bool:
        """Whether an acknowledgement of a peer is still missing."""
        return any(key.peer == peer for key in self._open)

    def acknowledged(self, peer: PeerKey, aborted: Aborted, now: float) -> None:
        """The source has acknowledged. A repeated or late acknowledgement changes nothing."""
        for pending in self._asked(peer, aborted.claim_id):
            # Another incarnation knows nothing of the claim: its answer means that the one we asked has ended.
            is_clean = aborted.is_clean and aborted.epoch == peer.epoch
            pending.fence(0.0 if is_clean or pending.is_revoked else self._timing.fence_s, now)

    def _asked(self, peer: PeerKey, claim_id: str) -> Iterator[_PendingAbort]:
        """What this peer may acknowledge: also what was claimed when it was met at another address."""
        source = self._peers[peer].source if peer in self._peers else None
        if source in self._peers.withheld:
            for key, pending in self._open.items():
                if key.claim_id == claim_id and (key.peer == peer or pending.access == source):
                    yield pending
        elif own := self._open.get(ReadKey(claim_id, peer)):
            yield own

    def gone(self, peer: PeerKey, now: float) -> None:
        """The process of a peer has ended."""
        for key, pending in self._open.items():
            if key.peer == peer:
                pending.fence(self._timing.fence_s, now)

    def access_of(self, peer: PeerKey) -> frozenset[Party]:
        """By whose access a peer may still write, of what can be revoked."""
        pending = [each for key, each in self._open.items() if key.peer == peer and not each.is_revoked]
        return frozenset(each.access for each in pending if each.access is not None)

    def revoked(self, access: Party) -> list[ReadKey]:
        """Nothing arrives by this access any more. Returns what could be written by it."""
        ended = [key for key, each in self._open.items() if each.access == access and not each.is_revoked]
        for key in ended:
            self._open[key].is_revoked = True
        self._peers.withheld |= {access}
        return ended

    @property
    def withheld(self) -> frozenset[Party]:
        """Sources whose access was revoked, and that have not acknowledged everything since."""
        return frozenset(each.access for each in self._open.values() if each.is_revoked and each.access is not None)

    def take_finished(self, now: float) -> list[tuple[ReadKey, bool]]:
        """Forget the aborts that are over, and return them, each with whether its source may have written.

        Only time in which this process runs is counted: its own buffers empty only then.
        """
        over = [key for key, pending in self._open.items() if self._is_over(key, pending, now)]
        self._last_turn = now
        return [(key, self._open.pop(key).is_exposed) for key in over]

    def _is_over(self, key: ReadKey, pending: _PendingAbort, now: float) -> bool:
        if not pending.is_exposed:
            is_silent = now - pending.first_sent >= self._timing.silence_s
            return pending.fence_s < inf or is_silent or key.peer not in self._peers
        pending.fence_s -= min(now - max(self._last_turn, pending.fenced_at), self._timing.resend_s)
        return pending.fence_s <= 0.0

    def repeat(self, now: float) -> Iterator[c.Send | c.CheckLiveness]:
        """Send again what has not been acknowledged for a while, and check whether a silent source is still there."""
        silent: dict[PeerKey, None] = {}
        reconnected: set[PeerKey] = set()
        for key, pending in self._open.items():
            if pending.fence_s < inf or now - pending.last_sent < self._timing.resend_s:
                continue
            pending.last_sent = now
            is_anew = pending.is_exposed and pending.replaces_connection(now) and key.peer not in reconnected
            if is_anew:
                reconnected.add(key.peer)
            yield c.Send(key.peer, pending.abort, is_anew)
            if pending.is_revoked and pending.access is not None:
                others = [other for other in self._peers.known_as(pending.access) if other != key.peer]
                yield from (c.Send(other, pending.abort) for other in others)
            if pending.is_exposed and now - pending.first_sent >= self._timing.silence_s:
                silent[key.peer] = None
        for peer in silent:
            yield c.CheckLiveness(peer)


class Quarantine:
    """The failed ones among the fetches of one rank. Those that are over are removed here."""

    def __init__(self, fetches: dict[str, Fetch], aborts: PendingAborts, peers: Handshakes) -> None:
        self._fetches = fetches
        self._aborts = aborts
        self._peers = peers

    def fail(self, fetch: Fetch, error: TransferError, now: float) -> Iterator[c.Command]:
        """End a fetch: tell the engine, tell every source, and keep the blocks until nothing can write to them."""
        fetch.failed = True
        yield c.Count("fetches_failed", error.reason)
        yield c.FetchFailed(fetch.request.request_id, error)
        for key, read in fetch.reads.items():
            if read.state is ReadState.MOVING and Direction.READ in read.movers:
                yield c.Cancel(fetch.key(key))
            for pipeline in read.pipeline:
                yield from pipeline.fail()
            if read.is_digesting:
                yield c.DropDigest(fetch.key(key))
            is_posted = read.state is ReadState.MOVING
            read.machine.move("fail")
            if not is_posted and read.is_open:
                # Our own ticket was never posted.
                read.ended(Direction.READ)
        for key in fetch.peers:
            yield from self._aborts.send(fetch.request, key, fetch.reads.get(key), now)
        for key in [key for key, read in fetch.reads.items() if read.strategy.is_staged]:
            yield from self.drained(fetch.key(key))
        yield from self.free_when_drained(fetch)

    def drained(self, work: ReadKey | ClaimKey) -> Iterator[c.Command]:
        """End a failed staged read when none of its slots is open. Another read ends with its ticket."""
        fetch = self._fetches.get(work.claim_id) if isinstance(work, ReadKey) else None
        if fetch is not None and isinstance(work, ReadKey) and fetch.failed and work.peer in fetch.reads:
            read = fetch.reads[work.peer]
            is_staged = read.strategy.is_staged and read.state is ReadState.DRAINING
            if is_staged and not any(pipeline.is_open for pipeline in read.pipeline):
                read.machine.move("ticket ended")
            yield from self.free_when_drained(fetch)

    def free_when_drained(self, fetch: Fetch) -> Iterator[c.Command]:
        """Give the blocks of a failed fetch back when nothing can change them, and forget it when no ticket of it is
        open: a slot that a silent source may write to is kept, and nobody's request waits for it."""
        if not fetch.has_open_tickets and self._fetches.get(fetch.request.claim_id) is fetch:
            del self._fetches[fetch.request.claim_id]
        if not (fetch.is_released or fetch.may_change_blocks):
            fetch.is_released = True
            yield c.BlocksReleased(fetch.request.request_id)

    def end_acknowledged(self, now: float) -> Iterator[c.Command]:
        """End the quarantine that waited for a source which has acknowledged, or which cannot write any more."""
        for key, was_exposed in self._aborts.take_finished(now):
            yield from self._fenced(key)
            # Aborts reconnect to a lost peer: disconnect it after the last, even if a late message has ended the read.
            if was_exposed and key.peer not in self._peers and not self._aborts.awaits(key.peer):
                yield c.Disconnect(key.peer)
        if self._peers.withheld:
            yield from self._peers.admit(self._aborts.withheld, now)

    def revoke(self, access: Party) -> Iterator[c.Command]:
        """Take a source's access, and end the quarantine that waited for it."""
        yield c.Revoke(access)
        for key in self._aborts.revoked(access):
            yield from self._fenced(key)

    def _fenced(self, key: ReadKey) -> Iterator[c.Command]:
        """Nothing that the source of a read has written, or will write, arrives any more."""
        fetch = self._fetches.get(key.claim_id)
        if fetch is not None and key.peer in fetch.reads and fetch.reads[key.peer].is_exposed:
            read = fetch.reads[key.peer]
            if not read.strategy.is_staged:
                read.ended(Direction.WRITE)
            for pipeline in read.pipeline:
                yield from pipeline.fenced()
            yield from self.drained(key)
            yield from self.free_when_drained(fetch)
