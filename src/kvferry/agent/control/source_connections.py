"""Connections to the sources that this agent fetches from: one ZeroMQ socket for each.

ZeroMQ connects again and again, also to somebody who ends every handshake. Who does that uses another token, or is no
agent at all: no answer will ever come. So each connection is watched until its handshake has succeeded, and where it
does not, it begins anew with the next token that is accepted.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import zmq

from kvferry.agent.control.addresses import is_connectable
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
from kvferry.wire.codec import MAX_FRAME_BYTES

MAX_SOURCES = 4096
# After these ZeroMQ does not connect again.
FINAL: Final = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED | sum(FINAL)
)
# How a connection ends that the other side ends. Otherwise its handshake has taken too long.
ENDED_BY_PEER: Final = (errno.EPIPE, errno.ECONNRESET)
# A busy or suspended peer lets a handshake end by its time limit, of which both sides have the same.
AT_ONCE_S = HANDSHAKE_MS / 2000


@dataclass(slots=True)
class _Connection:
    """`monitor` is there until the handshake has succeeded; the present attempt has begun at `began`. `tokens` are
    those that were not tried yet, for which `frames` are kept."""

    peer: PeerKey
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes] | None
    began: float
    tokens: tuple[SharedToken, ...]
    frames: list[bytes] = field(default_factory=list)
    is_timed_out: bool = False


class SourceConnections:
    """Only the thread of the channel uses them. `clock` is in seconds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: Poller,
        token: SharedToken,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._poller = poller
        self._token = token
        self._clock = clock
        self._by_peer: dict[PeerKey, _Connection] = {}
        # By its socket and by its monitor.
        self._by_socket: dict[zmq.Socket[bytes], _Connection] = {}
        self._refused_by: list[PeerKey] = []

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Connects on first use. False when that fails, is not allowed, or the queue is full."""
        if peer not in self._by_peer:
            is_full = len(self._by_peer) >= MAX_SOURCES
            if is_full or not is_connectable(peer.address, self._token) or not self._connect(peer, self._token.each):
                return False
        connection = self._by_peer[peer]
        if connection.tokens and len(connection.frames) < MAX_QUEUED:
            connection.frames.append(frame)
        return send_now(connection.socket, self._poller, [frame])

    def receive(self, ready: set[zmq.Socket[bytes]]) -> Iterator[tuple[PeerKey, bytes]]:
        """The frames that have arrived at those sockets that can be read."""
        for socket in ready & self._by_socket.keys():
            # One that was just before it may have ended it.
            if (connection := self._by_socket.get(socket)) is None:
                continue
            if socket is connection.monitor:
                self._watch(connection)
            else:
                yield from ((connection.peer, parts[0] if len(parts) == 1 else b"") for parts in received(socket))

    def refused_by(self) -> list[PeerKey]:
        """Whoever has ended our handshake since the last call. It is not connected to any more."""
        found, self._refused_by = self._refused_by, []
        return found

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        if connection := self._by_peer.pop(peer, None):
            self._close_monitor(connection)
            self._close(connection.socket)

    def _connect(self, peer: PeerKey, tokens: tuple[SharedToken, ...]) -> bool:
        """Begin with the first of these tokens. False where there are too many sockets, or the address is invalid: no
        answer will come before the deadline of the session."""
        try:
            socket = open_socket(self._context, self._poller, zmq.DEALER, MAX_FRAME_BYTES)
            connection = _Connection(peer, socket, None, self._clock(), tokens[1:])
            self._by_peer[peer] = self._by_socket[socket] = connection
            connection.monitor = monitor(socket, EVENTS)
            self._by_socket[connection.monitor] = connection
            self._poller.register(connection.monitor)
            socket.setsockopt(zmq.IPV6, int("[" in peer.address))
            if tokens:
                secure_connecting(socket, tokens[0])
            socket.connect(peer.address)
        except (zmq.ZMQError, OSError):
            self.forget(peer)
            return False
        return True

    def _watch(self, connection: _Connection) -> None:
        """A handshake that the other side ends at once would end in the same way each time."""
        for event, error in monitored(connection.monitor) if connection.monitor else ():
            is_at_once = self._clock() - connection.began < AT_ONCE_S
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.tokens, connection.frames = (), []
                self._close_monitor(connection)
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                connection.is_timed_out = error not in ENDED_BY_PEER
            elif event in FINAL or (is_at_once and not connection.is_timed_out):
                self._begin_anew(connection)
                return
            else:
                connection.began, connection.is_timed_out = self._clock(), False

    def _begin_anew(self, connection: _Connection) -> None:
        """With the next token, if there is one; what was said is said again."""
        self.forget(connection.peer)
        if not connection.tokens:
            self._refused_by.append(connection.peer)
        elif self._connect(connection.peer, connection.tokens):
            for frame in connection.frames:
                self.send(connection.peer, frame)

    def _close_monitor(self, connection: _Connection) -> None:
        if connection.monitor is not None:
            connection.socket.disable_monitor()
            self._close(connection.monitor)
            connection.monitor = None

    def _close(self, socket: zmq.Socket[bytes]) -> None:
        self._by_socket.pop(socket, None)
        self._poller.unregister(socket)
        socket.close()
