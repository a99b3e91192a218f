"""The sockets of the control channel: one to be addressed by targets, one per source that we address.

ZeroMQ frames messages, reconnects and keeps a slow peer from blocking us: a message that cannot be queued is dropped
and counted, the session repeats what was not answered. With a shared token every connection is encrypted and both
sides prove that they know it (`curve`); without one, nothing but this host is listened to or connected to.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

import zmq

from kvferry.agent.control.connection_limit import MAX_CONNECTIONS, Doors
from kvferry.agent.control.curve import Admission, secure_connecting, secure_listening
from kvferry.agent.control.listen_addresses import is_connectable, listening_address
from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken
from kvferry.agent.control.time_slice import short_slices
from kvferry.errors import ConfigurationError
from kvferry.session.keys import PeerKey
from kvferry.system.tcp_keepalive import IDLE_S, INTERVAL_S, NUM_PROBES, USER_TIMEOUT_MS
from kvferry.wire.codec import MAX_FRAME_BYTES, MAX_REQUEST_BYTES

MAX_FRAMES_PER_TURN = 256
# Decoding takes time: after so many bytes from one socket, transports and heartbeats have their turn.
MAX_BYTES_PER_TURN = 4 << 20
MAX_LINKS = 512
# Messages that wait for one peer, in either direction; ZeroMQ slows that peer down, or drops and we count.
MAX_QUEUED = 256
# A stranger that connects and says nothing is gone after this.
HANDSHAKE_MS = 5_000
# A peer whose host has vanished is forgotten after these.
PING_MS, PONG_MS = 10_000, 30_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame from a peer: `link` is the source that we address, or `name` whom to answer when it addressed us."""

    link: tuple[PeerKey, ...]
    name: str
    frame: bytes


class ControlChannel:
    """Belongs to one thread. `address` is where targets reach us."""

    def __init__(
        self, host: str, port: int, token: SharedToken = NO_TOKEN, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """Listen on `host`; port 0 lets the system choose.

        Raises ConfigurationError when that is impossible, and without a token for any host but this one.
        """
        address = listening_address(host, token)
        self._token = token
        self._counts: Counter[tuple[str, str]] = Counter()
        self._links: dict[PeerKey, zmq.Socket[bytes]] = {}
        try:
            self._doors = Doors(address, port, max_connections)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for the transfer's control channel",
                found=error.strerror or str(error),
                hint="--transfer-host is an address of this host, such as 127.0.0.1"
                if error.errno == errno.EADDRNOTAVAIL
                else "choose another --transfer-port, or 0 for any free one",
            ) from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        try:
            # ZeroMQ asks for admission before it lets anybody in, so this is there first.
            with short_slices():
                # The first socket starts the context's threads, which are to have a core at once when there is a word.
                self._admission = tuple(Admission(self._context, each) for each in (token,) if each)
                self._router = self._socket(zmq.ROUTER, MAX_REQUEST_BYTES)
            # Else it would drop silently what a slow peer does not take.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if token:
                secure_listening(self._router, token)
            self._monitor = self._doors.attach(self._router)
        except (ConfigurationError, zmq.ZMQError):
            self.close()
            raise
        for socket in (self._monitor, *(each.socket for each in self._admission)):
            self._poller.register(socket, zmq.POLLIN)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def watch(self, fd: int) -> None:
        """Return early from `receive` when this file descriptor can be read."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Send to a source; connects on first use. False when that fails, is not allowed, or its queue is full."""
        if peer not in self._links:
            if len(self._links) >= MAX_LINKS or not is_connectable(peer.address, self._token):
                return False
            try:
                self._connect(peer)
            except zmq.ZMQError:
                # Too many sockets, or an address that makes no sense: nobody will answer; the deadline will say so.
                self.forget(peer)
                return False
        return _send(self._links[peer], [frame])

    def reply(self, name: str, frame: bytes) -> bool:
        """Answer a target by the name that its frame came with. False when its queue is full or it has gone."""
        return _send(self._router, [bytes.fromhex(name), frame])

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        if link := self._links.pop(peer, None):
            self._poller.unregister(link)
            link.close()

    def receive(self, wait_s: float) -> list[Arrival]:
        """All frames that are there, after waiting at most `wait_s` seconds for the first; at most a turn's worth."""
        ready = dict(self._poller.poll(ceil(wait_s * 1000)))
        for admission in self._admission:
            if admission.socket in ready:
                admission.answer()
        if self._monitor in ready:
            self._doors.watch(self._monitor)
        arrivals: list[Arrival] = []
        if self._router in ready:
            for parts in _frames(self._router):
                # A target's DEALER sends exactly one part; anything else is refused like other nonsense.
                arrivals.append(Arrival((), parts[0].hex(), parts[1] if len(parts) == 2 else b""))
        for peer, link in self._links.items():
            if link in ready:
                arrivals += [Arrival((peer,), "", parts[0] if len(parts) == 1 else b"") for parts in _frames(link)]
        return arrivals

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Who was not let in since the last time: (`connections_refused`, reason)."""
        refused, self._doors.refused = self._doors.refused, Counter()
        return Counter({("connections_refused", reason): number for reason, number in refused.items()})

    @property
    def num_connections(self) -> int:
        """Connections that others have made to us, those included that have not shown yet who they are."""
        return self._doors.num_inside

    def close(self) -> None:
        """Close all sockets; nothing is sent any more. Safe to call twice."""
        self._doors.close()
        self._context.destroy(linger=0)

    def _connect(self, peer: PeerKey) -> None:
        link = self._links[peer] = self._socket(zmq.DEALER, MAX_FRAME_BYTES)
        link.setsockopt(zmq.IPV6, int("[" in peer.address))
        if self._token:
            secure_connecting(link, self._token)
        link.connect(peer.address)

    def _socket(self, kind: int, max_bytes: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (*OPTIONS.items(), (zmq.MAXMSGSIZE, max_bytes)):
            socket.setsockopt(option, value)
        self._poller.register(socket, zmq.POLLIN)
        return socket


OPTIONS: Final = {
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.HEARTBEAT_IVL: PING_MS,
    zmq.HEARTBEAT_TIMEOUT: PONG_MS,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: IDLE_S,
    zmq.TCP_KEEPALIVE_INTVL: INTERVAL_S,
    zmq.TCP_KEEPALIVE_CNT: NUM_PROBES,
    zmq.TCP_MAXRT: USER_TIMEOUT_MS,
    zmq.SNDHWM: MAX_QUEUED,
    zmq.RCVHWM: MAX_QUEUED,
}


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What has arrived, up to a turn's worth; the rest stays in its queues, where it slows its sender down."""
    num_bytes = 0
    for _ in range(MAX_FRAMES_PER_TURN):
        if num_bytes > MAX_BYTES_PER_TURN:
            return
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        num_bytes += sum(map(len, parts))
        yield parts


def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError:
        # Its queue is full, or who has asked is gone.
        return False
    return True
