"""How many connections the control channel has: beyond a limit, nobody else can connect until somebody leaves.

ZeroMQ accepts whoever comes and has no such limit, so that a stranger who opens connections and says nothing could
take all file descriptors of the engine. It tells what happens at its socket, and the kernel can be told to ignore
attempts to connect, which are then made again later. Connections that are there are not affected.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections import Counter
from ipaddress import ip_address
from typing import Final

import zmq

from kvferry.transport.machine.addresses import family_of

MAX_CONNECTIONS = 512
BACKLOG = 64

REFUSALS: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "unfinished",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "stranger",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "stranger",
}
# An event's number and, of most, the connection's descriptor.
TOLD: Final = struct.Struct("=Hi")
EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | sum(REFUSALS)

# From Linux' <asm-generic/socket.h>; Python has no names for them. The filter is one instruction: keep 0 bytes.
SO_ATTACH_FILTER: Final = 26
SO_DETACH_FILTER: Final = 27
IGNORE_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class Doors:
    """The listening socket, and how many have come through it. Belongs to the channel's thread."""

    def __init__(self, host: str, port: int, max_connections: int = MAX_CONNECTIONS) -> None:
        """Listen; port 0 lets the system choose. Raises OSError when that is impossible."""
        self._listener = socket.create_server((host, port), family=family_of(ip_address(host)), backlog=BACKLOG)
        # ZeroMQ expects that; else a connection that is gone before it is accepted would hold up all others.
        self._listener.setblocking(False)
        self._max_connections = max_connections
        self._inside: set[int] = set()
        self._are_shut = False
        self.refused: Counter[str] = Counter()

    def attach(self, router: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Let a socket accept connections here. Returns the one on which it tells about them: `watch` it."""
        name = f"inproc://doors-{id(self):x}"
        router.monitor(name, EVENTS)
        monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        # Without a limit, as ZeroMQ's own thread would otherwise wait for us to read.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(name)
        host, port = self._listener.getsockname()[:2]
        # It closes what it is given; ours stays.
        router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        router.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        return monitor

    @property
    def num_inside(self) -> int:
        """Connections that are open, those included that have not shown yet who they are."""
        return len(self._inside)

    def watch(self, monitor: zmq.Socket[bytes]) -> None:
        """Take note of all that has happened."""
        while monitor.poll(0):
            event, fd = TOLD.unpack(monitor.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._inside.add(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                self._inside.discard(fd)
            else:
                self.refused[REFUSALS[event]] += 1
        self._shut(len(self._inside) >= self._max_connections)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._listener.close()

    def _shut(self, wanted: bool) -> None:
        if wanted == self._are_shut:
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
            # A kernel that cannot do that: the process's own limit of descriptors is then the only one.
        self._are_shut = wanted
