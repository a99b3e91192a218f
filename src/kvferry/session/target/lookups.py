"""Lookups: whose address is it, where an engine knows only where a source rank listens?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import TransferError
from kvferry.session.commands import Command, Disconnect, Located, LocateFailed, RemoteEngine, Send
from kvferry.session.events import LocateRequest
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.timeouts import Timing
from kvferry.wire.messages import WIRE_VERSION, Hello, Message, Reason, Refusal, Welcome


@dataclass(slots=True)
class _Lookup:
    deadline: float
    last_sent: float


class Lookups:
    """Those that are under way. Each is asked again until it is answered or has taken as long as a handshake may."""

    def __init__(self, ours: TargetIdentity, timing: Timing) -> None:
        self._ours = ours
        self._timing = timing
        self._open: dict[PeerKey, _Lookup] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, event: LocateRequest, now: float) -> Iterator[Command]:
        """Ask, unless that is under way."""
        key = PeerKey(event.address, "", "")
        if key not in self._open:
            self._open[key] = _Lookup(now + self._timing.handshake_s, now)
            yield self._ask(key)

    def answered(self, key: PeerKey, message: Message) -> Iterator[Command]:
        """Somebody has said who it is, or why that is no use."""
        if key not in self._open:
            return
        match message:
            case Welcome(party=party, num_ranks=num_ranks, addresses=addresses):
                if addresses and len(addresses) == num_ranks:
                    yield from self._end(
                        key, Located(key.address, RemoteEngine(party.engine_id, party.epoch, addresses))
                    )
                elif addresses or num_ranks != 1:
                    what, found = "a source does not name its ranks", f"{len(addresses)} addresses, {num_ranks} ranks"
                    yield from self._fail(key, TransferError(Reason.MALFORMED, what, found=found))
                else:
                    engine = RemoteEngine(party.engine_id, party.epoch, (key.address,))
                    yield from self._end(key, Located(key.address, engine))
            case Refusal(reason, what, found, expected):
                yield from self._fail(key, TransferError(reason, what, found=found, expected=expected))

    def repeat(self, now: float) -> Iterator[Command]:
        """Ask again what has not been answered, and give up what has taken too long."""
        for key, lookup in list(self._open.items()):
            if now >= lookup.deadline:
                what = f"nobody at {key.address} has said who it is within {self._timing.handshake_s:g} s"
                hint = "is that engine running, and do both engines have the same token?"
                yield from self._fail(key, TransferError(Reason.DEADLINE, what, hint=hint))
            elif now - lookup.last_sent >= self._timing.resend_s:
                lookup.last_sent = now
                yield self._ask(key)

    def _ask(self, key: PeerKey) -> Send:
        return Send(key, Hello(WIRE_VERSION, self._ours.product_version, self._ours.party, "", ""))

    def _fail(self, key: PeerKey, error: TransferError) -> Iterator[Command]:
        yield from self._end(key, LocateFailed(key.address, error))

    def _end(self, key: PeerKey, notice: Located | LocateFailed) -> Iterator[Command]:
        del self._open[key]
        yield Disconnect(key)
        yield notice
