"""The sockets of the control channel: one that targets connect to, and one per source that this agent connects to.

ZeroMQ frames messages, reconnects, and keeps a slow peer from blocking the agent: a message that cannot be queued is
dropped and counted, and the session repeats what was not answered. With a shared token every connection is encrypted
and both sides prove that they know it (`curve`); without one, the channel stays within this host.
"""

from __future__ import annotations

import errno
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import zmq

from kvferry.agent.control.addresses import is_connectable, listening_address
from kvferry.agent.control.connection_limit import MAX_CONNECTIONS, LimitedListener
from kvferry.agent.control.curve import Admission, secure_connecting, secure_listening
from kvferry.agent.control.poller import Poller
from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken
from kvferry.agent.control.time_slice import short_slices
from kvferry.errors import ConfigurationError
from kvferry.session.keys import PeerKey
from kvferry.system import IDLE_S, INTERVAL_S, NUM_PROBES, USER_TIMEOUT_MS
from kvferry.wire.codec import MAX_FRAME_BYTES, MAX_REQUEST_BYTES

MAX_FRAMES_PER_RECEIVE = 256
# Decoding takes time: after this many bytes of one socket, transports and heartbeats are served.
MAX_BYTES_PER_RECEIVE = 4 << 20
MAX_SOURCES = 4096
# That of targets, its monitor, and those that admit them.
OTHER_SOCKETS = 16
# High-water mark of a peer's messages in either direction. Beyond it ZeroMQ slows the peer down, or drops messages.
MAX_QUEUED = 256
# A connection that does not finish its handshake is closed after this.
HANDSHAKE_MS = 5_000
# ZeroMQ's own heartbeats: a peer whose host has vanished is forgotten after these.
PING_MS, PONG_MS = 10_000, 30_000


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame from a peer: from the `source` that this agent has connected to, or from a target with this
    `routing_id`."""

    source: tuple[PeerKey, ...]
    routing_id: str
    frame: bytes


class ControlChannel:
    """Only one thread uses it. `address` is where targets connect to."""

    def __init__(
        self, host: str, port: int, token: SharedToken = NO_TOKEN, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """Listen on `host`; port 0 lets the system choose.

        Raises ConfigurationError when that is impossible, and without a token for any host but this one.
        """
        address = listening_address(host, token)
        self._token = token
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sources: dict[PeerKey, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], PeerKey] = {}
        try:
            self._listener = LimitedListener(address, port, max_connections)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for the transfer's control channel",
                found=error.strerror or str(error),
                hint="--transfer-host is an address of this host, such as 127.0.0.1"
                if error.errno == errno.EADDRNOTAVAIL
                else "choose another --transfer-port, or 0 for any free one",
            ) from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOURCES + OTHER_SOCKETS)
        self._poller = Poller()
        # Also where nobody closes it: a context that is collected before its sockets waits for them for ever.
        self._end = weakref.finalize(self, _close, self._listener, self._context, self._poller)
        self._end.atexit = False
        try:
            # ZeroMQ authenticates through this socket, so it exists before the router.
            with short_slices():
                # The first socket starts the context's threads, which shall get a core at once when a message comes.
                self._admission = tuple(Admission(self._context, each) for each in (token,) if each)
                self._router = self._socket(zmq.ROUTER, MAX_REQUEST_BYTES)
            # Otherwise it would silently drop what a slow peer does not take.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if token:
                secure_listening(self._router, token)
            self._monitor = self._listener.attach(self._router)
        except (ConfigurationError, zmq.ZMQError, OSError):
            self.close()
            raise
        for socket in (self._monitor, *(each.socket for each in self._admission)):
            self._poller.register(socket)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def watch(self, fd: int) -> None:
        """Return early from `receive` when this file descriptor can be read."""
        self._poller.watch(fd)

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Send to a source; connects on first use. False when that fails, is not allowed, or its queue is full."""
        if peer not in self._sources:
            if len(self._sources) >= MAX_SOURCES or not is_connectable(peer.address, self._token):
                return False
            try:
                self._connect(peer)
            except (zmq.ZMQError, OSError):
                # Too many sockets, or an invalid address: no answer will come before the deadline of the session.
                self.forget(peer)
                return False
        return self._send(self._sources[peer], [frame])

    def reply(self, routing_id: str, frame: bytes) -> bool:
        """Answer a target by its routing id. False when its queue is full or it has disconnected."""
        return self._send(self._router, [bytes.fromhex(routing_id), frame])

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        if socket := self._sources.pop(peer, None):
            self._peers.pop(socket, None)
            self._poller.unregister(socket)
            socket.close()

    def receive(self, wait_s: float) -> list[ReceivedFrame]:
        """The frames that have arrived, after waiting at most `wait_s` seconds for the first; a bounded number."""
        ready = self._poller.poll(wait_s)
        for admission in self._admission:
            if admission.socket in ready:
                admission.answer()
        if self._monitor in ready:
            self._listener.watch(self._monitor)
        found: list[ReceivedFrame] = []
        if self._router in ready:
            for parts in _frames(self._router):
                # A target's DEALER sends exactly one part; anything else is refused like other invalid frames.
                found.append(ReceivedFrame((), parts[0].hex(), parts[1] if len(parts) == 2 else b""))
        for socket in ready & self._peers.keys():
            peer = self._peers[socket]
            found += [ReceivedFrame((peer,), "", parts[0] if len(parts) == 1 else b"") for parts in _frames(socket)]
        for socket in ready:
            self._poller.note_used(socket)
        return found

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Connections that were refused since the last time: (`connections_refused`, reason)."""
        refused, self._listener.refused = self._listener.refused, Counter()
        return Counter({("connections_refused", reason): number for reason, number in refused.items()})

    @property
    def num_connections(self) -> int:
        """Connections of others to this agent, including those that are not authenticated yet."""
        return self._listener.num_connections

    def close(self) -> None:
        """Close all sockets; nothing is sent any more. Safe to call twice."""
        self._end.detach()
        _close(self._listener, self._context, self._poller)

    def _connect(self, peer: PeerKey) -> None:
        socket = self._sources[peer] = self._socket(zmq.DEALER, MAX_FRAME_BYTES)
        self._peers[socket] = peer
        socket.setsockopt(zmq.IPV6, int("[" in peer.address))
        if self._token:
            secure_connecting(socket, self._token)
        socket.connect(peer.address)

    def _socket(self, kind: int, max_bytes: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (*OPTIONS.items(), (zmq.MAXMSGSIZE, max_bytes)):
            socket.setsockopt(option, value)
        try:
            self._poller.register(socket)
        except OSError:
            socket.close()
            raise
        return socket

    def _send(self, socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
        self._poller.note_used(socket)
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            # The queue is full, or the peer has disconnected.
            return False
        return True


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


def _close(listener: LimitedListener, context: zmq.Context[zmq.Socket[bytes]], poller: Poller) -> None:
    """The poller knows all sockets: as long as it is there they are, and the context can close them."""
    listener.close()
    context.destroy(linger=0)
    poller.close()


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What has arrived, up to a limit; the rest stays queued, which slows its sender down."""
    num_bytes = 0
    for _ in range(MAX_FRAMES_PER_RECEIVE):
        if num_bytes > MAX_BYTES_PER_RECEIVE:
            return
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        num_bytes += sum(map(len, parts))
        yield parts
