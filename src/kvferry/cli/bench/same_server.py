"""Whether two URLs lead to one server, however they are spelled."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}


def is_same_server(one: str, other: str) -> bool:
    """Whether both URLs have one path and lead to one address and port. False where that cannot be told."""
    if one == other:
        return True
    try:
        parts = urlsplit(one), urlsplit(other)
        # Two names may be two servers behind one address, as behind an ingress.
        if not any(_is_address(each) for each in parts) or parts[0].path != parts[1].path:
            return False
        return not _places(parts[0]).isdisjoint(_places(parts[1]))
    except (OSError, ValueError):
        return False


def _is_address(url: SplitResult) -> bool:
    """Whether its host can be nothing but a machine."""
    if url.hostname == "localhost":
        return True
    try:
        ip_address(url.hostname or "")
    except ValueError:
        return False
    return True


def _places(url: SplitResult) -> set[tuple[object, ...]]:
    """Its addresses with its port. Raises OSError, and ValueError for what is no port or no name."""
    port = url.port or PORTS.get(url.scheme, 0)
    found = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
    return {address[:2] for *_, address in found}
