"""Aborts that a source has not acknowledged yet: said again until it has, or until it counts as silent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.session.events import FetchWanted, PeerKey, ReadKey, Send, Timing
from kvferry.session.handshake import Handshakes
from kvferry.wire.messages import Abort, Party

__all__ = ["Farewells"]


@dataclass(slots=True)
class _Farewell:
    abort: Abort
    until: float
    last_sent: float


class Farewells:
    """At-least-once delivery of the end of a claim."""

    def __init__(self, ours: Party, peers: Handshakes, timing: Timing) -> None:
        self._ours = ours
        self._peers = peers
        self._timing = timing
        self._open: dict[ReadKey, _Farewell] = {}

    def __len__(self) -> int:
        return len(self._open)

    def say(self, wanted: FetchWanted, key: PeerKey, now: float) -> Iterator[Send]:
        """Tell a source that its blocks are not wanted any more; nothing for one that has been lost."""
        if key in self._peers:
            abort = Abort(self._ours, wanted.request_id, wanted.reference.lease_id)
            self._open[ReadKey(wanted.request_id, key)] = _Farewell(abort, now + self._timing.silence_s, now)
            yield Send(key, abort)

    def noted(self, claim_id: str, key: PeerKey) -> None:
        """The source has acknowledged; again or late is fine."""
        self._open.pop(ReadKey(claim_id, key), None)

    def repeat(self, now: float) -> Iterator[Send]:
        """Say again what has not been acknowledged for a while, and give up after a peer's time of silence."""
        for key, farewell in list(self._open.items()):
            if now >= farewell.until or key.peer not in self._peers:
                del self._open[key]
            elif now - farewell.last_sent >= self._timing.resend_s:
                farewell.last_sent = now
                yield Send(key.peer, farewell.abort)
