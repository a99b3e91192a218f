"""HTTP requests to engines, sent by aiohttp: connections, their limits, and the head of a request."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
from dataclasses import dataclass

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from kvferry.http.access import bearer
from kvferry.router.request.headers import Headers
from kvferry.router.upstream.failures import FAILURES
from kvferry.router.upstream.response import HttpResponse
from kvferry.system.tcp_keepalive import keep_alive

# Less than servers keep theirs (vLLM: 5 s): a connection that the engine closes in the moment of its next use looks
# like a broken engine.
KEEP_ALIVE_S = 2.0
# Of one line, or one header, of an answer's head.
MAX_HEADER_BYTES = 1 << 16
# aiohttp warns of longer bodies that are given as bytes, since it writes them in one go.
LARGE_BODY_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request to an engine: `base` is the URL of an instance, `target` path and query, already encoded."""

    method: str
    base: str
    target: str
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A response that has come to its end."""

    status: int
    headers: Headers
    body: bytes


class HttpClient:
    """Belongs to one event loop; `aclose` it in the end. It opens as many connections as there are requests."""

    def __init__(self, connect_timeout_s: float, api_key: str = "") -> None:
        """With an `api_key` every request shows it, in place of whatever the caller of the router has shown."""
        self._authorization = (bearer(api_key),) if api_key else ()
        # `connect` covers everything up to an open connection: name, TCP, TLS.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._tls = ssl.create_default_context()
        self._background: set[asyncio.Task[None]] = set()
        self._kept = self._session(keepalive_timeout=KEEP_ALIVE_S)
        self._single_use = self._session(force_close=True)

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send a request and wait for the head of its response. Raises FAILURES. Cancelling it closes the connection.

        A GET has a connection of its own: a probe is to find out whether there is one.
        """
        session = self._single_use if request.method == "GET" else self._kept
        headers = request.headers
        if self._authorization:
            headers = [*(pair for pair in headers if pair[0].lower() != b"authorization"), *self._authorization]
        try:
            response = await session.request(
                request.method,
                URL(request.base + request.target, encoded=True),
                headers=[(_text(name), _text(value)) for name, value in headers],
                data=_payload(request.body),
                allow_redirects=False,
            )
        except UnicodeError as error:
            raise ConnectionRefusedError(f"{request.base} has no host that can be looked up: {error}") from error
        return HttpResponse(response)

    async def fetch(self, request: HttpRequest, max_bytes: int) -> WholeResponse:
        """The response with its whole body. Raises FAILURES, among them PeerError for more than `max_bytes`."""
        response = await self.send(request)
        try:
            return WholeResponse(response.status, response.headers, await response.whole(max_bytes))
        finally:
            response.close()

    def send_in_background(self, request: HttpRequest, limit_s: float) -> None:
        """Send a request of which the response does not matter; one that fails is only logged."""
        task = asyncio.create_task(self._send_and_forget(request, limit_s))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_and_forget(self, request: HttpRequest, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                (await self.send(request)).close()
        except FAILURES as error:
            logger.info("a background request to %s failed: %r", request.base, error)

    async def aclose(self) -> None:
        """Close all connections, after what is under way in the background: it has time limits of its own."""
        if self._background:
            await asyncio.wait(self._background)
        await self._kept.close()
        await self._single_use.close()
        # The event loop closes sockets in its next turn.
        await asyncio.sleep(0)

    def _session(self, keepalive_timeout: float | None = None, force_close: bool = False) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            ssl=self._tls,
            use_dns_cache=False,
            keepalive_timeout=keepalive_timeout,
            force_close=force_close,
            socket_factory=_socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )


class _Response(aiohttp.ClientResponse):
    """What comes on an idle connection breaks it. aiohttp would take it for the answer to the next request."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        if connection.protocol is None or connection.protocol.should_close:
            raise aiohttp.ClientConnectionError("the engine has sent what nobody had asked for")
        return await super().start(connection)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """As many connections are silent for minutes, each notices by itself when the other host is gone."""
    found = socket.socket(*address[:3])
    keep_alive(found)
    return found


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    if not body:
        return None
    return body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)


def _text(value: bytes) -> str:
    """aiohttp writes headers in UTF-8."""
    return value.decode("utf-8", "replace")
