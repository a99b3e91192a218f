"""The one form of a control address: `tcp://IP:port`. A name would have to be looked up; a scope is one host's own."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

ADDRESS = re.compile(r"tcp://(?:\[([0-9a-f:]{2,39})\]|([0-9.]{7,15})):([1-9][0-9]{0,4})", re.ASCII)
MAX_PORT = 65_535


def place_of(address: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Host and port of an address. Raises ValueError for anything else."""
    matched = ADDRESS.fullmatch(address)
    if matched is None:
        raise ValueError("an address is not of the form tcp://IP:port")
    host, port = ip_address(matched[1] or matched[2]), int(matched[3])
    if port > MAX_PORT:
        raise ValueError(f"a port is larger than {MAX_PORT}")
    return host, port


def is_address(address: str, on_this_host: bool = False) -> bool:
    """Whether a peer may be there; `on_this_host`, and nowhere else."""
    try:
        host, _ = place_of(address)
    except ValueError:
        return False
    return host.is_loopback or not on_this_host
