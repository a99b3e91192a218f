"""Which of many sockets have something to read, at a cost that depends only on those that have.

`zmq.Poller` asks every socket each time: 4 microseconds each, and an agent may have a thousand peers. A ZeroMQ socket
has a file descriptor that says when its events *may* have changed, and says so once. So a socket is also asked after it
has been used, since that takes the news from the descriptor. See ZMQ_FD and ZMQ_EVENTS in ZeroMQ's `zmq_getsockopt`.
"""

from __future__ import annotations

import select

import zmq


class Poller:
    """Watches sockets that are read, and other descriptors. Only one thread uses it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._used: set[zmq.Socket[bytes]] = set()

    def register(self, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket. Raises OSError when the system watches no more."""
        fd = int(socket.getsockopt(zmq.FD))
        self._epoll.register(fd, select.EPOLLIN)
        self._sockets[fd] = socket
        self._used.add(socket)

    def watch(self, fd: int) -> None:
        """Have `poll` return when this descriptor can be read."""
        self._epoll.register(fd, select.EPOLLIN)

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Stop watching a socket that is about to be closed. One that could not be watched is fine."""
        fd = int(socket.getsockopt(zmq.FD))
        if self._sockets.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        self._used.discard(socket)

    def note_used(self, socket: zmq.Socket[bytes]) -> None:
        """Note that something was sent or received: the next `poll` asks this socket."""
        self._used.add(socket)

    def poll(self, wait_s: float) -> set[zmq.Socket[bytes]]:
        """The sockets that can be read now, after waiting at most so long for the first, or for a descriptor."""
        ready = {socket for socket in self._used if _can_be_read(socket)}
        self._used.clear()
        changed = (self._sockets.get(fd) for fd, _ in self._epoll.poll(0 if ready else wait_s))
        ready.update(socket for socket in changed if socket is not None and _can_be_read(socket))
        return ready

    def close(self) -> None:
        """Close the poller. Safe to call twice."""
        self._epoll.close()


def _can_be_read(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
