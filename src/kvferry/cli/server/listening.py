"""The sockets that HTTP servers listen on: IPv4, IPv6, or both."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.errors import ConfigurationError
from kvferry.system import USER_TIMEOUT_MS, keep_alive

# Connections that wait to be accepted.
BACKLOG = 128
# The system counts milliseconds in 31 bits.
MAX_STALL_S = 1e6


def reserve(host: str, port: int) -> socket.socket:
    """Bind a socket, so that the system gives its port to nobody else. A server that sets SO_REUSEADDR, as servers do,
    can still listen there. Port 0 lets the system choose; `::` takes IPv4 as well. Raises ConfigurationError when the
    port cannot be bound."""
    with _told_where(host, port):
        family, address = _address_of(host, port)
        # asyncio turns Nagle's algorithm off only where the protocol is named; uvicorn writes head and body apart, and
        # the second of two small writes would wait for the peer's delayed acknowledgement, 40 ms.
        held = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # Accepted connections inherit it, whichever event loop accepts them.
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind(address)
        except OSError:
            held.close()
            raise
    return held


def listen(host: str, port: int, stall_s: float = 0.0) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Who serves gives clients up that take nothing of an answer for
    `stall_s` seconds, and the system does not before. Raises ConfigurationError when the port cannot be bound."""
    bound = reserve(host, port)
    with _told_where(host, port):
        try:
            limit_ms = USER_TIMEOUT_MS + int(1000 * min(stall_s, MAX_STALL_S))
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of the server at this socket's address."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_of(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """IPv4 where a name has both: every client can reach that."""
    bare = host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


@contextmanager
def _told_where(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise ConfigurationError(
            f"cannot listen on {host}:{port}",
            found=getattr(error, "strerror", None) or str(error),
            hint="choose another --port, or 0 for any free one" if taken else "127.0.0.1 always works on this machine",
        ) from error
