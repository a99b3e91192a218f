"""Looks up the names of engines' hosts for aiohttp."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
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

    It has threads of its own: those of the loop are few, and are wanted for other work. Nobody waits for them when the
    process ends. All who ask for a name meanwhile wait for one lookup.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_LOOKUPS)
        self._under_way: dict[_Name, asyncio.Task[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host. Raises OSError, or UnicodeError for what is no name."""
        name = host, port, family
        if name not in self._under_way:
            lookup = self._under_way[name] = asyncio.create_task(self._look_up(name))
            lookup.add_done_callback(partial(self._ended, name))
        return await asyncio.shield(self._under_way[name])

    async def close(self) -> None:
        """Wait for nobody: a lookup that is under way cannot be ended."""
        for lookup in tuple(self._under_way.values()):
            lookup.cancel()

    async def _look_up(self, name: _Name) -> list[ResolveResult]:
        async with self._turns:
            loop = asyncio.get_running_loop()
            found: asyncio.Future[list[ResolveResult]] = loop.create_future()
            thread = threading.Thread(target=_tell, args=(name, loop, found), name="kvferry-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(f"no thread can be started to look up {name[0]}") from error
            return await found

    def _ended(self, name: _Name, lookup: asyncio.Task[list[ResolveResult]]) -> None:
        del self._under_way[name]
        if not lookup.cancelled():
            # An error that nobody waits for any more would be logged.
            lookup.exception()


def _tell(name: _Name, loop: asyncio.AbstractEventLoop, found: asyncio.Future[list[ResolveResult]]) -> None:
    """Look a name up, and tell the loop, which may have ended meanwhile."""
    try:
        addresses = _addresses(*name)
    except Exception as error:  # noqa: BLE001 - the top of a thread: whoever waits gets it
        settle = partial(_settle, found, found.set_exception, error)
    else:
        settle = partial(_settle, found, found.set_result, addresses)
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)


def _settle(found: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    if not found.done():
        settle(outcome)


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_result(host, family, proto, address) for family, _, proto, _, address in found]


def _result(name: str, family: socket.AddressFamily, proto: int, address: Any) -> ResolveResult:
    # An address inside one network needs the name of the network's interface.
    host, port = socket.getnameinfo(address, NUMERIC_NAME)
    return ResolveResult(hostname=name, host=host, port=int(port), family=family, proto=proto, flags=NUMERIC_ADDRESS)
