"""Looks up the names of engines' hosts for aiohttp."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

# A name for which no name server answers keeps a thread for many seconds, whoever still waits for it.
MAX_LOOKUPS = 256
NUMERIC_NAME = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
NUMERIC_ADDRESS = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV

_Name = tuple[str, int, socket.AddressFamily]


class NameLookup(AbstractResolver):
    """Belongs to one event loop; `close` it in the end.

    It has threads of its own: those of the loop are few, and are wanted for other work. All who ask for a name
    meanwhile wait for one lookup.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "kvferry-lookup")
        self._under_way: dict[_Name, asyncio.Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host. Raises OSError, or UnicodeError for what is no name."""
        name = host, port, family
        if name not in self._under_way:
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, *name)
            self._under_way[name] = lookup
            lookup.add_done_callback(partial(self._ended, name))
        return await asyncio.shield(self._under_way[name])

    async def close(self) -> None:
        """Wait for nobody: a lookup that is under way cannot be ended."""
        for lookup in tuple(self._under_way.values()):
            lookup.cancel()
        self._threads.shutdown(wait=False)

    def _ended(self, name: _Name, lookup: asyncio.Future[list[ResolveResult]]) -> None:
        del self._under_way[name]
        if not lookup.cancelled():
            # An error that nobody waits for any more would be logged.
            lookup.exception()


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_result(host, family, proto, address) for family, _, proto, _, address in found]


def _result(name: str, family: socket.AddressFamily, proto: int, address: Any) -> ResolveResult:
    # An address inside one network needs the name of the network's interface.
    host, port = socket.getnameinfo(address, NUMERIC_NAME)
    return ResolveResult(hostname=name, host=host, port=int(port), family=family, proto=proto, flags=NUMERIC_ADDRESS)
