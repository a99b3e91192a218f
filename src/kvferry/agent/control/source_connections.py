"""Connections to the sources that this agent fetches from: one ZeroMQ socket for each.

ZeroMQ connects again and again, also to somebody who ends every handshake. Who does that does not hold our token, or is
no agent at all: no answer will ever come. So each connection is watched until its handshake has succeeded.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import zmq

from kvferry.agent.control.addresses import is_connectable
from kvferry.agent.control.curve import secure_connecting
from kvferry.agent.control.poller import Poller
from kvferry.agent.control.shared_token import SharedToken
from kvferry.agent.control.sockets import HANDSHAKE_MS, monitor, monitored, open_socket, received, send_now
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
    """`monitor` is there until the handshake has succeeded; the present attempt has begun at `began`."""

    peer: PeerKey
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes] | None
    began: float
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
            if len(self._by_peer) >= MAX_SOURCES or not is_connectable(peer.address, self._token):
                return False
            try:
                self._connect(peer)
            except (zmq.ZMQError, OSError):
                # Too many sockets, or an invalid address: no answer will come before the deadline of the session.
                self.forget(peer)
                return False
        return send_now(self._by_peer[peer].socket, self._poller, [frame])

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

    def _connect(self, peer: PeerKey) -> None:
        socket = open_socket(self._context, self._poller, zmq.DEALER, MAX_FRAME_BYTES)
        connection = self._by_peer[peer] = self._by_socket[socket] = _Connection(peer, socket, None, self._clock())
        connection.monitor = monitor(socket, EVENTS)
        self._by_socket[connection.monitor] = connection
        self._poller.register(connection.monitor)
        socket.setsockopt(zmq.IPV6, int("[" in peer.address))
        if self._token:
            secure_connecting(socket, self._token)
        socket.connect(peer.address)

    def _watch(self, connection: _Connection) -> None:
        """A handshake that the other side ends at once would end in the same way each time."""
        for event, error in monitored(connection.monitor) if connection.monitor else ():
            is_at_once = self._clock() - connection.began < AT_ONCE_S
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._close_monitor(connection)
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                connection.is_timed_out = error not in ENDED_BY_PEER
            elif event in FINAL or (is_at_once and not connection.is_timed_out):
                self._refused_by.append(connection.peer)
                self.forget(connection.peer)
                return
            else:
                connection.began, connection.is_timed_out = self._clock(), False

    def _close_monitor(self, connection: _Connection) -> None:
        if connection.monitor is not None:
            connection.socket.disable_monitor()
            self._close(connection.monitor)
            connection.monitor = None

    def _close(self, socket: zmq.Socket[bytes]) -> None:
        self._by_socket.pop(socket, None)
        self._poller.unregister(socket)
        socket.close()
