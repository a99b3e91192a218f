"""The control channel between nodes: frames are encoded, delayed, lost, doubled, spoiled, delivered and decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.session.events import PeerGone, PeerKey
from kvferry.testing.simulation.site import Site
from kvferry.wire.codec import encode
from kvferry.wire.messages import Message

if TYPE_CHECKING:
    from kvferry.testing.simulation.node import Node

MIN_DELAY_S = 0.0005


class FrameFabric:
    """Knows who listens at which address, and whom to answer by which name."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._listeners: dict[str, Node] = {}
        self._names: dict[str, tuple[Node, PeerKey]] = {}
        self._last: dict[tuple[str, str], float] = {}

    def listen(self, node: Node) -> None:
        """From now on, this node answers at its address."""
        self._listeners[node.address] = node

    def send(self, node: Node, peer: PeerKey, message: Message) -> None:
        """To whoever listens at a source's address when the frame gets there."""
        name = f"{node.name}#{node.epoch}>{peer}"
        self._names[name] = node, peer

        def deliver(frame: bytes) -> None:
            listener = self._listeners.get(peer.address)
            if listener is not None:
                listener.inbox.put(0, lambda: listener.frame_arrived(name, frame))

        self._travel((node.engine_name, _engine_at(peer.address)), encode(message), deliver)

    def reply(self, node: Node, name: str, message: Message) -> None:
        """To a target by the name that its frame came with."""
        target, peer = self._names[name]

        def deliver(frame: bytes) -> None:
            target.inbox.put(0, lambda: target.answer_arrived(peer, frame))

        self._travel((node.engine_name, target.engine_name), encode(message), deliver)

    def knock(self, node: Node, peer: PeerKey) -> None:
        """Ask the host of a peer whether anybody listens there; nobody answers across a partition."""
        listener = self._listeners.get(peer.address)
        cut = self._site.is_cut(node.engine_name, _engine_at(peer.address))
        if not cut and (listener is None or not listener.alive):
            node.carried(PeerGone(peer))

    def _travel(self, way: tuple[str, str], frame: bytes, deliver: Callable[[bytes], None]) -> None:
        site, world, faults = self._site, self._site.world, self._site.faults
        if site.is_cut(*way) or world.chance(faults.drop):
            site.story.fault("dropped frame", way[0], "to", way[1])
            return
        if world.chance(faults.flip):
            site.story.fault("flipped bit", way[0], "to", way[1])
            frame = flipped(frame, world.dice.randrange(len(frame) * 8))
        copies = 1 + world.chance(faults.duplicate)
        if copies > 1:
            site.story.fault("doubled frame", way[0], "to", way[1])
        for _ in range(copies):
            world.at(self._arrival(way), lambda: deliver(frame))

    def _arrival(self, way: tuple[str, str]) -> float:
        """When a frame gets there: behind those that went the same way before, unless it is one of those that do
        not wait."""
        world, faults = self._site.world, self._site.faults
        time = world.now + world.between(MIN_DELAY_S, faults.max_delay_s)
        if world.chance(faults.reorder):
            self._site.story.fault("overtaking frame", way[0], "to", way[1])
            return time + world.between(0.0, 10 * faults.max_delay_s)
        self._last[way] = time = max(time, self._last.get(way, 0.0))
        return time


def flipped(frame: bytes, bit: int) -> bytes:
    """A frame with one bit turned round."""
    spoiled = bytearray(frame)
    spoiled[bit // 8] ^= 1 << bit % 8
    return bytes(spoiled)


def _engine_at(address: str) -> str:
    return address.removeprefix("sim://").split("/")[0]
