"""The sockets of the control channel: one to be addressed by targets, one per source that we address.

ZeroMQ frames messages, reconnects and keeps a slow peer from blocking us: a message that cannot be queued is dropped
and counted, the session repeats what was not answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from math import ceil

import zmq

from kvferry.errors import ConfigurationError
from kvferry.session.events import PeerKey
from kvferry.wire.codec import MAX_FRAME_BYTES

__all__ = ["Arrival", "ControlChannel"]

MAX_FRAMES_PER_TURN = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame from a peer: `link` is the source that we address, or `name` whom to answer when it addressed us."""

    link: tuple[PeerKey, ...]
    name: str
    frame: bytes


class ControlChannel:
    """Belongs to one thread. `address` is where targets reach us."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on `host`; port 0 lets the system choose. Raises ConfigurationError when that is impossible."""
        _check_loopback(host)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[PeerKey, zmq.Socket[bytes]] = {}
        self._router = self._socket(zmq.ROUTER)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for the transfer's control channel",
                found=str(error),
                hint="choose another --transfer-port, or 0 for any free one",
            ) from error
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def watch(self, fd: int) -> None:
        """Return early from `receive` when this file descriptor can be read."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Send to a source; connects on first use. False when that fails or its queue is full."""
        try:
            if peer not in self._links:
                self._links[peer] = self._socket(zmq.DEALER)
                self._links[peer].connect(peer.address)
        except zmq.ZMQError:
            # Too many sockets, or an address that makes no sense: nobody will answer, and the deadline will say so.
            self.forget(peer)
            return False
        return _send(self._links[peer], [frame])

    def reply(self, name: str, frame: bytes) -> bool:
        """Answer a target by the name that its frame came with. False when its queue is full."""
        return _send(self._router, [bytes.fromhex(name), frame])

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        if link := self._links.pop(peer, None):
            self._poller.unregister(link)
            link.close()

    def receive(self, wait_s: float) -> list[Arrival]:
        """All frames that are there, after waiting at most `wait_s` seconds for the first."""
        ready = dict(self._poller.poll(ceil(wait_s * 1000)))
        arrivals: list[Arrival] = []
        if self._router in ready:
            for parts in _frames(self._router):
                # A target's DEALER sends exactly one part; anything else is refused like other nonsense.
                arrivals.append(Arrival((), parts[0].hex(), parts[1] if len(parts) == 2 else b""))
        for peer, link in self._links.items():
            if link in ready:
                arrivals += [Arrival((peer,), "", parts[0] if len(parts) == 1 else b"") for parts in _frames(link)]
        return arrivals

    def close(self) -> None:
        """Close all sockets; nothing is sent any more. Safe to call twice."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._poller.register(socket, zmq.POLLIN)
        return socket


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(MAX_FRAMES_PER_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _check_loopback(host: str) -> None:
    """The control channel is not authenticated yet, so it must not be reachable from other hosts."""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise ConfigurationError(
            "the control channel only listens on this host",
            found=host,
            expected="127.0.0.1",
            hint="authentication between hosts is not built yet; see the README's list of what works",
        )
