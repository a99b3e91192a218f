"""Lookups: whose address is it, where an engine knows only where a source rank listens?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import TransferError
from kvferry.session.commands import CheckLiveness, Command, Disconnect, Located, LocateFailed, RemoteEngine, Send
from kvferry.session.events import LocateRequest
from kvferry.session.keys import PeerKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.timing import Timing
from kvferry.wire.addresses import MAX_PORT, is_address
from kvferry.wire.messages import WIRE_VERSION, Hello, Message, Reason, Refusal, Welcome


@dataclass(slots=True)
class _Lookup:
    began: float
    deadline: float
    last_sent: float
    asked: list[LocateRequest]


class Lookups:
    """The lookups that are under way. Each is repeated until it is answered or has taken as long as a handshake may."""

    def __init__(self, ours: TargetIdentity, timing: Timing) -> None:
        self._ours = ours
        self._timing = timing
        self._open: dict[PeerKey, _Lookup] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, event: LocateRequest, now: float) -> Iterator[Command]:
        """Ask whose address it is, unless that lookup is under way."""
        yield from self._begin(event.address, event, now + self._timing.handshake_s, now)

    def answered(self, key: PeerKey, message: Message, now: float) -> Iterator[Command]:
        """Handle an answer: the engine says who it is, or why it refuses."""
        if key not in self._open:
            return
        match message:
            case Welcome(addresses=addresses) if strange := [one for one in addresses if not self._may_ask(one)]:
                what, expected = "a source's rank is where nobody may be asked", "tcp://IP:port"
                expected += "" if self._ours.may_leave_host else " of this host, where there is no shared token"
                yield from self._fail(key, TransferError(Reason.MALFORMED, what, found=strange[0], expected=expected))
            case Welcome(num_ranks=num_ranks, addresses=addresses):
                is_named = bool(addresses) and len(addresses) == num_ranks
                if is_named or (not addresses and num_ranks == 1):
                    yield from self._found(key, message, now)
                else:
                    what, found = "a source does not name its ranks", f"{len(addresses)} addresses, {num_ranks} ranks"
                    yield from self._fail(key, TransferError(Reason.MALFORMED, what, found=found))
            case Refusal(reason, what, found, expected):
                yield from self._fail(key, TransferError(reason, what, found=found, expected=expected))

    def _may_ask(self, address: str) -> bool:
        return is_address(address, on_this_host=not self._ours.may_leave_host)

    def failed(self, key: PeerKey, error: TransferError, now: float, grace_s: float = 0.0) -> Iterator[Command]:
        """Fail a lookup that nobody can answer, once it is `grace_s` old. An address that nobody asks for is fine."""
        if key in self._open and now >= self._open[key].began + grace_s:
            yield from self._fail(key, error)

    def repeat(self, now: float) -> Iterator[Command]:
        """Ask again what has not been answered, check whether anybody is there, and give up what has taken too long."""
        for key, lookup in list(self._open.items()):
            if now >= lookup.deadline:
                what = f"nobody at {key.address} has said who it is within {self._timing.handshake_s:g} s"
                hint = "is that engine running, or overloaded?"
                yield from self._fail(key, TransferError(Reason.DEADLINE, what, hint=hint))
            elif now - lookup.last_sent >= self._timing.resend_s:
                lookup.last_sent = now
                yield self._ask(key)
                yield CheckLiveness(key)

    def _begin(self, address: str, event: LocateRequest, deadline: float, now: float) -> Iterator[Command]:
        key = PeerKey(address, "", "")
        if lookup := self._open.get(key):
            if event not in lookup.asked:
                lookup.asked.append(event)
            return
        self._open[key] = _Lookup(now, deadline, now, [event])
        yield self._ask(key)

    def _found(self, key: PeerKey, welcome: Welcome, now: float) -> Iterator[Command]:
        """Report the engine that has answered, or ask at the address of the one that is meant."""
        lookup, size = self._open.pop(key), welcome.data_parallel_size
        engine = RemoteEngine(welcome.party.engine_id, welcome.party.epoch, welcome.addresses or (key.address,))
        yield Disconnect(key)
        for event in lookup.asked:
            number = event.number % size
            # A lookup that began at another address was sent here by number 0, and means the engine that is here.
            if number == 0 or key.address != event.address:
                yield Located(event.address, engine, event.number, size)
            elif (address := _above(key.address, number)) is None:
                what = "no port is left for an engine of a server with data parallelism"
                error = TransferError(Reason.MALFORMED, what, found=f"{key.address}, number {number}")
                yield LocateFailed(event.address, error, event.number)
            else:
                yield from self._begin(address, event, lookup.deadline, now)

    def _ask(self, key: PeerKey) -> Send:
        return Send(key, Hello(WIRE_VERSION, self._ours.product_version, self._ours.party, "", ""))

    def _fail(self, key: PeerKey, error: TransferError) -> Iterator[Command]:
        lookup = self._open.pop(key)
        yield Disconnect(key)
        for event in lookup.asked:
            yield LocateFailed(event.address, error, event.number)


def _above(address: str, number: int) -> str | None:
    """The address so many ports above; None where there is no such port."""
    host, _, port = address.rpartition(":")
    above = int(port) + number
    return f"{host}:{above}" if above <= MAX_PORT else None
