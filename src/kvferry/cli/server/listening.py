"""The sockets that HTTP servers listen on: IPv4, IPv6, or both."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.errors import ConfigurationError
from kvferry.system.tcp_keepalive import keep_alive

# Connections that wait to be accepted.
BACKLOG = 128


def hold(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for a server which is told to listen there; port 0 lets the system choose. The server
    can, if it sets SO_REUSEADDR as servers do; the system gives the port to nobody else. `::` takes IPv4 as well.
    Raises ConfigurationError when it cannot be had."""
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigurationError when it cannot be had."""
    bound = hold(host, port)
    with _told_where(host, port):
        try:
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of who listens, or is going to listen, where this socket is bound."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_of(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Of a name that has both, the older protocol: clients that know only that one reach it, too."""
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
