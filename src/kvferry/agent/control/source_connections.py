"""Connections to the sources that this agent fetches from: one ZeroMQ socket for each.

ZeroMQ connects again and again, also to somebody who ends every handshake. Who goes on doing that uses another token,
or is no agent at all: no answer will ever come. So a connection is watched until its handshake has succeeded. Where the
other side ends it at once, it begins anew with the next token that is accepted. When all were refused, the next message
to the peer begins once more, since what is in between may just be starting, until it has been refused for some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import zmq

from kvferry.agent.control.curve import secure_connecting
from kvferry.agent.control.poller import Poller
from kvferry.agent.control.shared_token import SharedToken
from kvferry.agent.control.sockets import (
    HANDSHAKE_MS,
    MAX_QUEUED,
    monitor,
    monitored,
    open_socket,
    received,
    send_now,
)
from kvferry.session.keys import PeerKey
from kvferry.wire.addresses import is_address
from kvferry.wire.codec import MAX_FRAME_BYTES

MAX_SOURCES = 4096
# A monitor takes two sockets more: its own and ours. Handshakes take milliseconds: beyond this number, a connection is
# not watched, or has to wait where several tokens are to be tried.
MAX_WATCHED = 64
EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# A busy or suspended peer lets a handshake end by its time limit, of which both sides have the same.
AT_ONCE_S = HANDSHAKE_MS / 2000
# Whoever has refused us for so long will go on. A proxy does so while the agent behind it starts.
REFUSED_S = 3.0


@dataclass(slots=True)
class _Connection:
    """`monitor` is there until the handshake has succeeded. This attempt has begun at `began`, with the first of
    `tokens`; the others were not tried yet, and `frames` are kept for them."""

    peer: PeerKey
    socket: zmq.Socket[bytes]
    began: float
    tokens: tuple[SharedToken, ...]
    monitor: zmq.Socket[bytes] | None = None
    frames: list[bytes] = field(default_factory=list)


class SourceConnections:
    """Only the thread of the channel uses them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], poller: Poller, token: SharedToken) -> None:
        self._context = context
        self._poller = poller
        self._token = token
        self._by_peer: dict[PeerKey, _Connection] = {}
        # By its socket and by its monitor.
        self._by_socket: dict[zmq.Socket[bytes], _Connection] = {}
        # Since when a peer has refused all tokens.
        self._refused_since: dict[PeerKey, float] = {}
        self._refused_by: list[PeerKey] = []

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Connects on first use. False when that fails, is not allowed, or the queue is full. What is sent to somebody
        who refuses all tokens is lost."""
        if peer not in self._by_peer:
            is_full = len(self._by_peer) >= MAX_SOURCES
            may_connect = is_address(peer.address, on_this_host=not self._token)
            if is_full or not may_connect or not self._connect(peer, self._token.each):
                return False
        connection = self._by_peer[peer]
        if connection.monitor is not None and len(connection.frames) < MAX_QUEUED:
            connection.frames.append(frame)
        return send_now(connection.socket, self._poller, [frame])

    def receive(self, ready: set[zmq.Socket[bytes]]) -> Iterator[tuple[PeerKey, bytes]]:
        """The frames that have arrived at those sockets that can be read."""
        found = [(socket, self._by_socket[socket]) for socket in ready & self._by_socket.keys()]
        for socket, connection in found:
            if socket is connection.socket:
                yield from ((connection.peer, parts[0] if len(parts) == 1 else b"") for parts in received(socket))
        for socket, connection in found:
            if socket is connection.monitor:
                self._watch(connection, socket)

    def refused_by(self) -> list[PeerKey]:
        """Whoever has ended all our handshakes for some seconds. It is not connected to any more."""
        found, self._refused_by = self._refused_by, []
        return found

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        self._refused_since.pop(peer, None)
        self._refused_by = [each for each in self._refused_by if each != peer]
        self._drop(peer)

    def _connect(self, peer: PeerKey, tokens: tuple[SharedToken, ...]) -> bool:
        """Begin with the first of these tokens. False where there are too many sockets, or the address is invalid: no
        answer will come before the deadline of the session."""
        if not (is_watched := self._may_watch()) and len(tokens) > 1:
            return False
        try:
            socket = open_socket(self._context, self._poller, zmq.DEALER, MAX_FRAME_BYTES)
            connection = _Connection(peer, socket, time.monotonic(), tokens)
            self._by_peer[peer] = self._by_socket[socket] = connection
            if is_watched:
                connection.monitor = monitor(socket, EVENTS)
                self._by_socket[connection.monitor] = connection
                self._poller.register(connection.monitor)
            socket.setsockopt(zmq.IPV6, int("[" in peer.address))
            if tokens:
                secure_connecting(socket, tokens[0])
            socket.connect(peer.address)
        except (zmq.ZMQError, OSError):
            self._drop(peer)
            return False
        return True

    def _may_watch(self) -> bool:
        """Whether there is room for a monitor; a handshake that hangs makes room."""
        if len(self._by_socket) - len(self._by_peer) < MAX_WATCHED:
            return True
        late_s = time.monotonic() - AT_ONCE_S
        hung = (one for one in self._by_peer.values() if one.monitor is not None and one.began <= late_s)
        if (found := next(hung, None)) is None:
            return False
        self._unwatch(found)
        return True

    def _watch(self, connection: _Connection, reading: zmq.Socket[bytes]) -> None:
        """The first attempt of a socket has ended by the time that is known here. ZeroMQ may have made another one
        since, which counts if it has succeeded."""
        events = {event for event, _ in monitored(reading)}
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self._refused_since.pop(connection.peer, None)
            self._unwatch(connection)
        elif events and time.monotonic() - connection.began < AT_ONCE_S:
            self._refused(connection)
        elif events:
            self._refused_since.pop(connection.peer, None)
            self._begin_anew(connection, connection.tokens)

    def _refused(self, connection: _Connection) -> None:
        peer, others = connection.peer, connection.tokens[1:]
        if others:
            self._begin_anew(connection, others)
            return
        self._drop(peer)
        now = time.monotonic()
        if now - self._refused_since.setdefault(peer, now) >= REFUSED_S:
            del self._refused_since[peer]
            self._refused_by.append(peer)

    def _begin_anew(self, connection: _Connection, tokens: tuple[SharedToken, ...]) -> None:
        """What was said is said again."""
        self._drop(connection.peer)
        if self._connect(connection.peer, tokens):
            for frame in connection.frames:
                self.send(connection.peer, frame)

    def _drop(self, peer: PeerKey) -> None:
        if connection := self._by_peer.pop(peer, None):
            self._close_monitor(connection)
            self._close(connection.socket)

    def _unwatch(self, connection: _Connection) -> None:
        connection.frames.clear()
        self._close_monitor(connection)

    def _close_monitor(self, connection: _Connection) -> None:
        if connection.monitor is not None:
            connection.socket.disable_monitor()
            self._close(connection.monitor)
            connection.monitor = None

    def _close(self, socket: zmq.Socket[bytes]) -> None:
        self._by_socket.pop(socket, None)
        self._poller.unregister(socket)
        socket.close()
