"""The transports of one agent: which peer is reached over which, and which ticket belongs to which read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigurationError, TransportError
from kvferry.plan.copies import Copies
from kvferry.session.events import PeerConnected, PeerKey, PeerUnreachable, ReadKey, TicketEnded
from kvferry.transport.base import Direction, Memory, Ticket, Transport
from kvferry.transport.select import candidates, choose
from kvferry.transport.selftest import Measurement, Probe, measure
from kvferry.wire.messages import Offer, TransportOffer
from kvferry.wire.messages import Probe as ProbeOffer

__all__ = ["Carrier"]


@dataclass(frozen=True, slots=True)
class _Open:
    transport: Transport
    ticket: Ticket


class Carrier:
    """Belongs to one thread. `unavailable` says why a transport that users know is not there."""

    def __init__(self, requested: str, transports: Sequence[Transport], unavailable: Mapping[str, str]) -> None:
        self._requested = requested
        self._transports = {transport.name: transport for transport in transports}
        self._unavailable = dict(unavailable)
        self._routes: dict[PeerKey, Transport] = {}
        self._open: dict[ReadKey, _Open] = {}
        self._ended: list[TicketEnded] = []

    @property
    def busy(self) -> bool:
        """Whether a posted read has not ended yet."""
        return bool(self._open or self._ended)

    @property
    def progress_interval_s(self) -> float:
        """How often `poll` must run although nothing is posted here."""
        return min((transport.progress_interval_s for transport in self._transports.values()), default=float("inf"))

    def register(self, memories: Sequence[Memory]) -> None:
        """Register memory with every transport; one that cannot take it becomes unavailable, with the reason."""
        for name, transport in list(self._transports.items()):
            try:
                for memory in memories:
                    transport.register(memory)
            except TransportError as error:
                self._unavailable[name] = str(error)
                del self._transports[name]
                transport.close()

    def check_requested(self) -> None:
        """Raises ConfigurationError when the transport that the user asked for is unknown or cannot be used here."""
        candidates(self._requested, dict.fromkeys(self._transports, ""), self._available())

    def offers(self) -> tuple[TransportOffer, ...]:
        """What peers need to reach the registered memory, and why the other transports are not there."""
        working = [TransportOffer(name, transport.descriptor(), "") for name, transport in self._transports.items()]
        missing = [TransportOffer(name, b"", reason) for name, reason in self._unavailable.items()]
        return (*working, *missing)

    def connect(self, peer: PeerKey, offer: Offer) -> PeerConnected | PeerUnreachable:
        """Try what both sides have, measure it, and keep the fastest."""
        offered = {each.name: each.unavailable for each in offer.transports}
        descriptors = {each.name: each.descriptor for each in offer.transports}
        try:
            names = candidates(self._requested, offered, self._available())
            measured = [self._measure(self._transports[n], peer, descriptors[n], offer.probe) for n in names]
            choice = choose(measured)
        except (ConfigurationError, TransportError) as error:
            return PeerUnreachable(peer, str(error))
        for name in names:
            if name != choice.name:
                self._transports[name].disconnect(str(peer))
        self._routes[peer] = self._transports[choice.name]
        return PeerConnected(peer, choice.name, choice.reason)

    def disconnect(self, peer: PeerKey) -> None:
        """Forget a peer; its open reads end with an error in a later `poll`."""
        if transport := self._routes.pop(peer, None):
            transport.disconnect(str(peer))

    def post(self, key: ReadKey, copies: Copies) -> None:
        """Start a read; its end comes out of `poll`, also when it could not be started."""
        transport = self._routes.get(key.peer)
        if transport is None:
            self._ended.append(TicketEnded(key, "the peer is not connected any more"))
            return
        try:
            self._open[key] = _Open(transport, transport.post(str(key.peer), copies, Direction.READ))
        except TransportError as error:
            self._ended.append(TicketEnded(key, str(error)))

    def cancel(self, key: ReadKey) -> None:
        """Lose interest in a read; its end still comes out of `poll`."""
        if posted := self._open.get(key):
            posted.transport.cancel(posted.ticket)

    def poll(self) -> list[TicketEnded]:
        """Make progress on every transport and return the reads that have ended."""
        ended, self._ended = self._ended, []
        keys = {(posted.transport.name, posted.ticket): key for key, posted in self._open.items()}
        for name, transport in self._transports.items():
            for completion in transport.poll():
                key = keys.get((name, completion.ticket))
                if key is not None:
                    del self._open[key]
                    ended.append(TicketEnded(key, completion.error))
        return ended

    def _available(self) -> dict[str, str]:
        return dict.fromkeys(self._transports, "") | self._unavailable

    def _measure(self, transport: Transport, peer: PeerKey, descriptor: bytes, probe: ProbeOffer) -> Measurement:
        name = str(peer)
        try:
            transport.connect(name, descriptor)
        except TransportError as error:
            return Measurement(transport.name, 0.0, 0.0, str(error))
        return measure(transport, name, Probe(probe.address, probe.size_bytes, probe.seed))

    def close(self) -> None:
        """Close every transport. Safe to call twice."""
        for transport in self._transports.values():
            transport.close()
