"""What the operating system says and does: its errors in words, TCP connections that notice a lost host, its limits,
and what a forked child inherits."""

from __future__ import annotations

import errno
import os
import resource
import socket
import ssl
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

# A probe after so many seconds of silence, then one every so many seconds, and how many may go unanswered.
IDLE_S, INTERVAL_S, NUM_PROBES = 10, 5, 3
# The same limit for bytes that are not acknowledged.
USER_TIMEOUT_MS = 1000 * (IDLE_S + INTERVAL_S * NUM_PROBES)

RAISE_LIMIT = "let the process open more files: ulimit -n"

# Enough for an agent with more peers than it accepts, and for a router with as many engines. vLLM takes as many.
MANY_DESCRIPTORS = 1 << 16


def os_error_text(error: Exception) -> str:
    """Words such as `Connection refused`, not `<urlopen error [Errno 111] …>`: callers name the file or the address.

    Other errors than the system's are shown as they are.
    """
    # urllib wraps what has happened.
    inner = getattr(error, "reason", error)
    if not isinstance(inner, OSError):
        return str(error)
    # Failures to look up a name have numbers below 0 and words of their own, as those of TLS have; asyncio has put an
    # address into the words of others.
    is_plain = (inner.errno or 0) > 0 and not isinstance(inner, ssl.SSLError)
    return os.strerror(inner.errno or 0) if is_plain else inner.strerror or str(inner)


def hint_for(error: OSError, otherwise: str) -> str:
    """What to do about an error: where it is for lack of file descriptors, it says nothing of anybody else."""
    return RAISE_LIMIT if error.errno in (errno.EMFILE, errno.ENFILE) else otherwise


def keep_alive(sock: socket.socket) -> None:
    """End the connection when the other host is gone. Raises OSError for what is no TCP socket.

    Otherwise a connection on which nothing is to be sent outlives the other host by two hours, and one on which there
    is something to send by a quarter of an hour. Connections that a listening socket accepts inherit the setting.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def allow_many_descriptors() -> None:
    """Let this process and its children open as many files as the hard limit says, up to `MANY_DESCRIPTORS`.

    A peer takes two or three, six while it is busy, and many systems begin with a soft limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may refuse it; the limit is then the one that was there.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connected(Protocol):
    """Something with a socket that only this process is to use."""

    def leave_to_parent(self) -> None:
        """Let go of the socket, in a forked child."""
        ...


_CONNECTED: WeakSet[Connected] = WeakSet()


def close_in_children(connected: Connected) -> None:
    """Have each forked child leave `connected` to this process.

    A child inherits sockets: while it lives, nobody who is connected to one, or connects where it listens, would notice
    that its parent has closed it, or has died.
    """
    _CONNECTED.add(connected)


def _leave_to_parent() -> None:
    for connected in tuple(_CONNECTED):
        connected.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
