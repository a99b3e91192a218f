"""Open the transports that this process can use, and say why it cannot use the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import ConfigurationError, TransportError
from kvferry.transport.base import Transport
from kvferry.transport.cma import CrossMemoryTransport
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.select import AUTO
from kvferry.transport.shm import SharedMemoryTransport
from kvferry.transport.tcp import TcpTransport

__all__ = ["Opened", "check_name", "open_transports"]

OPENERS: dict[str, Callable[[str], Transport]] = {
    "shm": lambda host: SharedMemoryTransport(),
    "cma": lambda host: CrossMemoryTransport(),
    "nixl": lambda host: NixlTransport(),
    "tcp": TcpTransport,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """Open transports, and per transport that could not be opened the reason. The caller closes them."""

    transports: tuple[Transport, ...]
    unavailable: dict[str, str]


def check_name(requested: str) -> None:
    """Raises ConfigurationError unless `requested` is `auto` or the name of a transport between processes."""
    if requested not in (AUTO, *OPENERS):
        raise ConfigurationError(
            "unknown transport",
            found=requested,
            expected=f"{AUTO} or one of {', '.join(OPENERS)}",
            hint=f"{AUTO} measures all of them and takes the fastest",
        )


def open_transports(requested: str, host: str = "127.0.0.1") -> Opened:
    """Open one transport by name, or with `auto` all of them; those that listen do so on `host`.

    Raises ConfigurationError for an unknown name.
    """
    check_name(requested)
    transports: list[Transport] = []
    unavailable: dict[str, str] = {}
    for name, opener in OPENERS.items():
        if requested not in (AUTO, name):
            unavailable[name] = f"this engine was started with --transport {requested}"
            continue
        try:
            transports.append(opener(host))
        except TransportError as error:
            unavailable[name] = str(error)
    return Opened(tuple(transports), unavailable)
