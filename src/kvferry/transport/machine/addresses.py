"""The addresses of this host that something listens on: from a name or an address to one IP address."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from kvferry.errors import ConfigurationError
from kvferry.transport.machine.facts import Place

IPAddress = IPv4Address | IPv6Address


def resolve(host: str) -> IPAddress:
    """The IP address of a host: `127.0.0.1`, `::1`, `[::1]`, or a name. Raises ConfigurationError when it has none."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return _looked_up(host)


def family_of(address: IPAddress) -> socket.AddressFamily:
    """What a socket for this address is made with."""
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET


def place_of_peers(host: str) -> Place:
    """Where the peers of an engine can be that listens on `host`. Raises ConfigurationError when it has no address."""
    return Place.SAME_HOST if resolve(host).is_loopback else Place.UNKNOWN


def _looked_up(host: str) -> IPAddress:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            "this host has no address", found=f"{host}: {error}", hint="give an IP address"
        ) from error
    # Where a name has both, peers that only know the older protocol are reached too.
    return min((ip_address(str(entry[4][0])) for entry in found), key=lambda address: address.version)
