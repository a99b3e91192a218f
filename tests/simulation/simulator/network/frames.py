"""The control channel between ranks: frames are delayed, lost, duplicated, corrupted and delivered."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.session.events import PeerGone
from kvferry.session.keys import PeerKey
from kvferry.wire.codec import encode
from kvferry.wire.messages import Message
from simulator.context import RunContext
from simulator.network.receiver import Receiver

MIN_DELAY_S = 0.0005


class ControlNetwork:
    """Knows who listens at which address, and whom to answer by which name."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._listeners: dict[str, Receiver] = {}
        self._names: dict[str, tuple[Receiver, PeerKey]] = {}
        self._last: dict[tuple[str, str], float] = {}

    def listen(self, receiver: Receiver) -> None:
        """From now on, this rank answers at its address."""
        self._listeners[receiver.rank.address] = receiver

    def send(self, sender: Receiver, peer: PeerKey, message: Message) -> None:
        """To whoever listens at a source's address when the frame gets there."""
        name = f"{sender.rank.name}#{sender.rank.party.epoch}>{peer}"
        self._names[name] = sender, peer

        def deliver(frame: bytes) -> None:
            listener = self._listeners.get(peer.address)
            if listener is not None:
                listener.rank.inbox.put(0, lambda: listener.frame_arrived(name, frame))

        self._transmit((sender.rank.engine_name, _engine_at(peer.address)), encode(message), deliver)

    def reply(self, sender: Receiver, name: str, message: Message) -> None:
        """To a target by the name that its frame came with."""
        target, peer = self._names[name]

        def deliver(frame: bytes) -> None:
            target.rank.inbox.put(0, lambda: target.answer_arrived(peer, frame))

        self._transmit((sender.rank.engine_name, target.rank.engine_name), encode(message), deliver)

    def probe(self, sender: Receiver, peer: PeerKey) -> None:
        """Ask the host of a peer whether anybody listens there; nobody answers across a partition."""
        listener = self._listeners.get(peer.address)
        cut = self._context.is_cut(sender.rank.engine_name, _engine_at(peer.address))
        if not cut and (listener is None or not listener.rank.alive):
            sender.network_event(PeerGone(peer))

    def _transmit(self, link: tuple[str, str], frame: bytes, deliver: Callable[[bytes], None]) -> None:
        context, scheduler, faults = self._context, self._context.scheduler, self._context.faults
        if context.is_cut(*link) or scheduler.chance(faults.drop):
            context.log.fault("dropped frame", link[0], "to", link[1])
            return
        if scheduler.chance(faults.flip):
            context.log.fault("flipped bit", link[0], "to", link[1])
            frame = flipped(frame, scheduler.rng.randrange(len(frame) * 8))
        copies = 1 + scheduler.chance(faults.duplicate)
        if copies > 1:
            context.log.fault("doubled frame", link[0], "to", link[1])
        for _ in range(copies):
            scheduler.at(self._arrival(link), lambda: deliver(frame))

    def _arrival(self, link: tuple[str, str]) -> float:
        """When a frame gets there: behind those that went the same way before, unless it is one of those that do
        not wait."""
        scheduler, faults = self._context.scheduler, self._context.faults
        time = scheduler.now + scheduler.between(MIN_DELAY_S, faults.max_delay_s)
        if scheduler.chance(faults.reorder):
            self._context.log.fault("overtaking frame", link[0], "to", link[1])
            return time + scheduler.between(0.0, 10 * faults.max_delay_s)
        self._last[link] = time = max(time, self._last.get(link, 0.0))
        return time


def flipped(frame: bytes, bit: int) -> bytes:
    """A frame with one bit turned round."""
    corrupted = bytearray(frame)
    corrupted[bit // 8] ^= 1 << bit % 8
    return bytes(corrupted)


def _engine_at(address: str) -> str:
    return address.removeprefix("sim://").split("/")[0]
