"""Connections to upstreams, kept for a moment between two exchanges."""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.errors import TransportError
from kvferry.http.access import bearer
from kvferry.router.upstream.connection import Connection
from kvferry.system.os_errors import os_error_text
from kvferry.system.tcp_keepalive import keep_alive

# Less than servers keep theirs (vLLM: 5 s): one that the upstream closes in the moment of its next use looks like a
# broken engine.
KEPT_S = 2.0
# What a system says of hosts that do not answer it.
SILENT = frozenset((errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT))
DEFAULT_PORTS = {"http": 80, "https": 443}


class UnreachableError(OSError):
    """A host says nothing. Where it answers and nobody listens, the connection is refused instead."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instance is: `host_header` as requests name it, `prefix` what its paths begin with."""

    host: str
    port: int
    is_secure: bool
    host_header: bytes
    prefix: str


@functools.lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """Of a base URL that has been checked, such as `http://10.0.0.1:8100`."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
    return Origin(host, port, parts.scheme == "https", parts.netloc.encode(), parts.path)


class Pool:
    """Belongs to one event loop; `aclose` it in the end. As many connections as there are exchanges."""

    def __init__(self, connect_timeout_s: float, api_key: str = "") -> None:
        """With an `api_key` every request shows it, in place of whatever the caller of the router has shown."""
        self.authorization = (bearer(api_key),) if api_key else ()
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        # The one that was used last is the last.
        self._idle: dict[Origin, list[tuple[float, Connection]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, origin: Origin) -> Connection:
        """A kept connection, or a new one. Raises what `connect` does."""
        kept = self._idle.get(origin)
        while kept:
            since_s, connection = kept.pop()
            if connection.is_open and self._loop.time() - since_s < KEPT_S:
                return connection
            connection.close()
        return await self.connect(origin)

    async def connect(self, origin: Origin) -> Connection:
        """A new connection. Raises UnreachableError, TransportError: too slow, ConnectionRefusedError for all else."""
        secure = _default_context() if origin.is_secure else None
        try:
            async with asyncio.timeout(self._connect_timeout_s) as limit:
                made = await self._loop.create_connection(Connection, origin.host, origin.port, ssl=secure)
                transport, connection = made
                keep_alive(transport.get_extra_info("socket"))
        except (OSError, UnicodeError) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                expected = f"a connection within {self._connect_timeout_s:g} s"
                raise TransportError("an upstream does not accept connections", expected=expected) from error
            kind = UnreachableError if isinstance(error, OSError) and error.errno in SILENT else ConnectionRefusedError
            raise kind(f"no connection to {origin.host}:{origin.port}: {os_error_text(error)}") from error
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """The exchange is over; the connection is kept if it can carry another one, else closed."""
        if not connection.can_go_on:
            connection.close()
            return
        connection.rest()
        self._idle.setdefault(origin, []).append((self._loop.time(), connection))
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEPT_S, self._close_old)

    async def aclose(self) -> None:
        """Close all that nobody uses."""
        if self._sweep is not None:
            self._sweep.cancel()
        for kept in self._idle.values():
            for _, connection in kept:
                connection.close()
        self._idle.clear()
        # The event loop closes sockets in its next turn.
        await asyncio.sleep(0)

    def _close_old(self) -> None:
        """One timer for all of them, as long as there are any."""
        oldest_s, self._sweep = self._loop.time() - KEPT_S, None
        for origin, kept in list(self._idle.items()):
            for since_s, connection in kept:
                if since_s <= oldest_s:
                    connection.close()
            self._idle[origin] = [one for one in kept if one[0] > oldest_s]
            if not self._idle[origin]:
                del self._idle[origin]
        if self._idle:
            self._sweep = self._loop.call_later(KEPT_S / 2, self._close_old)


@functools.cache
def _default_context() -> ssl.SSLContext:
    return ssl.create_default_context()
