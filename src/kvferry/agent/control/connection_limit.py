"""The connection limit of the control channel.

ZeroMQ has no such limit: a host that opens connections and stays silent could take all file descriptors of the engine.
ZeroMQ's monitor reports the connections of its socket. At the limit a socket filter makes the kernel ignore connection
attempts, which their hosts repeat later. Open connections are not affected.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

import zmq

from kvferry.agent.control.sockets import monitor, monitored
from kvferry.system import close_in_children
from kvferry.transport.machine.addresses import family_of

MAX_CONNECTIONS = 4096
BACKLOG = 64

REFUSALS: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "unfinished",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "stranger",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "stranger",
}
EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | sum(REFUSALS)

# From Linux' <asm-generic/socket.h>; Python has no names for them. The filter is one instruction: keep 0 bytes.
SO_ATTACH_FILTER: Final = 26
SO_DETACH_FILTER: Final = 27
IGNORE_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class LimitedListener:
    """The listening socket, and how many connections it has. Only the thread of the channel uses it."""

    def __init__(self, host: str, port: int, max_connections: int = MAX_CONNECTIONS) -> None:
        """Listen; port 0 lets the system choose. Raises OSError when that is impossible."""
        self._listener = socket.create_server((host, port), family=family_of(ip_address(host)), backlog=BACKLOG)
        # ZeroMQ expects that: otherwise a connection that ends before it is accepted would block all others.
        self._listener.setblocking(False)
        close_in_children(self)
        # ZeroMQ's descriptor of the same socket.
        self._shared_fd = -1
        self._max_connections = max_connections
        self._open: set[int] = set()
        self._is_paused = False
        self.refused: Counter[str] = Counter()

    def attach(self, router: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Let a ZeroMQ socket accept connections here. Returns its monitor, which `watch` reads."""
        reading = monitor(router, EVENTS)
        host, port = self._listener.getsockname()[:2]
        # ZeroMQ closes the descriptor that it gets, so it gets a copy.
        self._shared_fd = os.dup(self._listener.fileno())
        router.setsockopt(zmq.USE_FD, self._shared_fd)
        router.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        return reading

    @property
    def num_connections(self) -> int:
        """Open connections, including those that are not authenticated yet."""
        return len(self._open)

    def watch(self, reading: zmq.Socket[bytes]) -> None:
        """Process all events of the monitor."""
        for event, fd in monitored(reading):
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.discard(fd)
            else:
                self.refused[REFUSALS[event]] += 1
        self._pause(len(self._open) >= self._max_connections)

    def leave_to_parent(self) -> None:
        """Close the listener in a forked child: only the parent listens, and peers must notice when it ends."""
        with suppress(OSError):
            if self._listener.fileno() >= 0 and os.path.sameopenfile(self._listener.fileno(), self._shared_fd):
                os.close(self._shared_fd)
        self.close()

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._listener.close()

    def _pause(self, wanted: bool) -> None:
        if wanted == self._is_paused:
            return
        try:
            if wanted:
                self.refused["full"] += 1
                code = ctypes.create_string_buffer(IGNORE_ALL, len(IGNORE_ALL))
                self._listener.setsockopt(
                    socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(code))
                )
            else:
                self._listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError as error:
            if error.errno not in (errno.ENOPROTOOPT, errno.ENOENT, errno.EPERM, errno.ENOMEM):
                raise
            # A kernel without socket filters: the process's limit of descriptors is then the only one.
        self._is_paused = wanted
