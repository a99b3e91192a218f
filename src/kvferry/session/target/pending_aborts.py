"""Aborts that a source has not acknowledged yet: sent again until it does, or until it counts as silent.

Blocks to which a source may still write must not be used by anybody else. So they wait for its acknowledgement. Silence
proves nothing, since a process that was stopped continues where it was. One of these does prove that it writes no more:

* the source acknowledges, which means that no ticket of the claim is open;
* another incarnation answers at its address, or its host says that nobody listens there: then its process has ended.

Bytes that were sent before may still be in the buffers of a transport, unless the write ended well. After anything else
the blocks wait for `fence_s` more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvferry.session.commands import CheckLiveness, Send
from kvferry.session.events import FetchRequest
from kvferry.session.keys import PeerKey, ReadKey
from kvferry.session.target.peers.handshakes import Handshakes
from kvferry.session.timeouts import Timing
from kvferry.wire.messages import Abort, Aborted, Party


@dataclass(slots=True)
class _PendingAbort:
    """With `is_exposed` the source may still write. `fence_s` is how long the blocks still have to wait, counted from
    `fenced_at`; it is infinite until the source has acknowledged or its process has ended."""

    abort: Abort
    first_sent: float
    last_sent: float
    is_exposed: bool
    fence_s: float = inf
    fenced_at: float = 0.0

    def fence(self, fence_s: float, now: float) -> None:
        """No acknowledgement is needed any more. If this is repeated, the first time counts."""
        if fence_s < self.fence_s:
            self.fence_s, self.fenced_at = fence_s, now


class PendingAborts:
    """At-least-once delivery of the end of a claim."""

    def __init__(self, ours: Party, peers: Handshakes, timing: Timing) -> None:
        self._ours = ours
        self._peers = peers
        self._timing = timing
        self._open: dict[ReadKey, _PendingAbort] = {}
        self._last_turn = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def send(self, wanted: FetchRequest, key: PeerKey, is_exposed: bool, now: float) -> Iterator[Send]:
        """Tell a source that its blocks are not wanted any more; one that has been lost only if it may still write."""
        if is_exposed or key in self._peers:
            abort = Abort(self._ours, wanted.claim_id, wanted.reference.lease_id)
            self._open[ReadKey(wanted.claim_id, key)] = _PendingAbort(abort, now, now, is_exposed)
            yield Send(key, abort)

    def awaits(self, peer: PeerKey) -> bool:
        """Whether an acknowledgement of a peer is still missing."""
        return any(key.peer == peer for key in self._open)

    def acknowledged(self, peer: PeerKey, aborted: Aborted, now: float) -> None:
        """The source has acknowledged. A repeated or late acknowledgement changes nothing."""
        key = ReadKey(aborted.claim_id, peer)
        if pending := self._open.get(key):
            # Another incarnation knows nothing of the claim: its answer means that the one we asked has ended.
            is_clean = aborted.is_clean and aborted.epoch == peer.epoch
            pending.fence(0.0 if is_clean else self._timing.fence_s, now)

    def gone(self, peer: PeerKey, now: float) -> None:
        """The process of a peer has ended."""
        for key, pending in self._open.items():
            if key.peer == peer:
                pending.fence(self._timing.fence_s, now)

    def take_finished(self, now: float) -> list[ReadKey]:
        """Forget those that are over, and return them.

        Only time in which this process runs is counted: its own buffers empty only then.
        """
        over = [key for key, pending in self._open.items() if self._is_over(key, pending, now)]
        self._last_turn = now
        for key in over:
            del self._open[key]
        return over

    def _is_over(self, key: ReadKey, pending: _PendingAbort, now: float) -> bool:
        if not pending.is_exposed:
            is_silent = now - pending.first_sent >= self._timing.silence_s
            return pending.fence_s < inf or is_silent or key.peer not in self._peers
        pending.fence_s -= min(now - max(self._last_turn, pending.fenced_at), self._timing.resend_s)
        return pending.fence_s <= 0.0

    def repeat(self, now: float) -> Iterator[Send | CheckLiveness]:
        """Send again what has not been acknowledged for a while, and check whether a silent source is still there."""
        silent: dict[PeerKey, None] = {}
        for key, pending in self._open.items():
            if pending.fence_s < inf or now - pending.last_sent < self._timing.resend_s:
                continue
            pending.last_sent = now
            yield Send(key.peer, pending.abort)
            if pending.is_exposed and now - pending.first_sent >= self._timing.silence_s:
                silent[key.peer] = None
        for peer in silent:
            yield CheckLiveness(peer)
