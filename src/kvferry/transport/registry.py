"""Every transport between processes by its name. Opens those that this process can use, and says why not the others.

A new transport is a folder beside this file and one line in `OPENERS`. Where its carriers copy with a processor, they
are named in `kvferry.agent.transports.costs` as well, which prices them; where they stay on one host, in
`kvferry.transport.selection.diagnosis`, which else takes them for a detour.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import ConfigurationError, TransportError
from kvferry.transport.base import Transport
from kvferry.transport.cma.transport import CrossMemoryTransport
from kvferry.transport.machine.addresses import place_of_peers
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.rowcopy import copier
from kvferry.transport.selection.candidates import AUTO
from kvferry.transport.shm.transport import SharedMemoryTransport
from kvferry.transport.tcp.transport import TcpTransport
from kvferry.transport.ucx.environment import prepare

# In the order in which they are tried: the usually fastest first. Each is given the address to listen on.
OPENERS: dict[str, Callable[[str], Transport]] = {
    "shm": lambda host: SharedMemoryTransport(),
    "cma": lambda host: CrossMemoryTransport(),
    "nixl": lambda host: NixlTransport(),
    "tcp": TcpTransport,
}

logger = logging.getLogger(__name__)


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


def open_transports(requested: str, host: str = "127.0.0.1", device: str = "cpu", buffer_device: str = "cpu") -> Opened:
    """Open one transport by name, or with `auto` all of them; those that listen do so on `host`.

    UCX's environment is chosen first, for an engine that computes on `device`, registers memory of `buffer_device`, and
    has peers on other hosts only if `host` can be reached from there.
    The loop that copies rows is prepared beside all that, in a thread of its own.
    Raises ConfigurationError for an unknown name, and for settings of the user's with which `requested` cannot work.
    """
    check_name(requested)
    copier.compile_in_background()
    transports: list[Transport] = []
    unavailable: dict[str, str] = {}
    for name, opener in OPENERS.items():
        if requested not in (AUTO, name):
            unavailable[name] = f"this engine was started with --transport {requested}"
            continue
        try:
            if name == "nixl":
                _prepare(device, buffer_device, place_of_peers(host), is_wanted=requested == name)
            transports.append(opener(host))
        except (ConfigurationError, TransportError) as error:
            if isinstance(error, ConfigurationError) and requested == name:
                raise
            unavailable[name] = str(error)
    return Opened(tuple(transports), unavailable)


def _prepare(device: str, buffer_device: str, place: Place, is_wanted: bool) -> None:
    """Where nixl is one of several, what may be wrong with it is no reason for alarm yet."""
    prepared = prepare(device, buffer_device, place)
    findings: tuple[Finding, ...] = (*prepared.late, *prepared.environment.warnings)
    for finding in findings:
        logger.log(logging.WARNING if is_wanted else logging.INFO, "nixl: %s", finding)
