"""HTTP requests to engines and their responses as they arrive, by aiohttp."""

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

from kvferry.errors import PeerError
from kvferry.http.access import bearer
from kvferry.http.client_errors import KEEP_ALIVE_S
from kvferry.router.request.headers import Headers
from kvferry.router.upstream.failures import FAILURES
from kvferry.router.upstream.name_lookup import NameLookup
from kvferry.system import keep_alive

# The limit for one line, or one header, of an answer's head.
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


class HttpResponse:
    """A response as it arrives: `close` it in the end. `is_over`: all of its body is taken. Raises only FAILURES."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)
        self.is_over = False
        self._is_closed = False
        self._end_of_connection = _end_of_connection(response)

    @property
    def is_plain_event_stream(self) -> bool:
        """Whether a server-sent event may be added: an uncompressed event stream of no announced length."""
        headers = self._response.headers
        is_event_stream = self._response.content_type == "text/event-stream"
        encoded = headers.get("Content-Encoding", "identity").lower() != "identity"
        return is_event_stream and not encoded and "Content-Length" not in headers

    async def piece(self) -> bytes:
        """The bytes that have arrived, at least one; empty at the end of the body."""
        content = self._response.content
        if self._is_closed:
            raise ConnectionResetError("the connection was closed")
        try:
            piece = await content.readany()
        except aiohttp.ClientConnectionError as error:
            if not self._is_closed:
                raise
            # aiohttp raises one and the same object for every connection that is closed here: what is in its traceback
            # would be kept in memory for ever.
            error.__traceback__ = None
            raise ConnectionResetError("the connection was closed") from None
        if content.at_eof():
            self._check_end()
            self.is_over = True
        return piece

    async def whole(self, max_bytes: int) -> bytes:
        """The whole body. Raises PeerError when it is longer than `max_bytes`."""
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > max_bytes:
                raise PeerError("an answer is too long", found="more", expected=f"at most {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """Close the connection if more is to come on it; one on which the answer has ended is kept."""
        self._is_closed = True
        self._response.close()

    def _check_end(self) -> None:
        """Raise if a body without a length was cut off: aiohttp takes any end of the connection for its end."""
        if self._end_of_connection is None:
            return
        if self._is_closed or not self._end_of_connection.done():
            raise ConnectionResetError("the connection was closed")
        self._end_of_connection.result()


class HttpClient:
    """Belongs to one event loop; `aclose` it in the end. It opens as many connections as there are requests."""

    def __init__(self, connect_timeout_s: float, api_key: str = "") -> None:
        """Show `api_key`, if there is one, in every request, in place of what the caller of the router has shown."""
        self._authorization = (bearer(api_key),) if api_key else ()
        # `connect` covers everything up to an open connection: name, TCP, TLS.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._tls = ssl.create_default_context()
        self._names = NameLookup()
        self._background: set[asyncio.Task[None]] = set()
        self._kept = self._session(keepalive_timeout=KEEP_ALIVE_S)
        self._single_use = self._session(force_close=True)

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send a request and wait for the head of its response. Raises FAILURES. Cancelling it closes the connection.

        A GET has a connection of its own: a probe is to find out whether one can be opened.
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
        try:
            if self._background:
                await asyncio.wait(self._background)
        finally:
            await self._kept.close()
            await self._single_use.close()
            await self._names.close()
        # The event loop closes sockets in its next turn.
        await asyncio.sleep(0)

    def _session(self, keepalive_timeout: float | None = None, force_close: bool = False) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            ssl=self._tls,
            resolver=self._names,
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
    """A response that refuses a connection on which bytes came while idle: aiohttp would take them for an answer."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        if connection.protocol is None or connection.protocol.should_close:
            raise aiohttp.ClientConnectionError("the engine has sent what nobody had asked for")
        return await super().start(connection)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices by itself when the other host is gone, since many connections are silent for minutes."""
    found = socket.socket(*address[:3])
    keep_alive(found)
    return found


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    if not body:
        return None
    return body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)


def _text(value: bytes) -> str:
    """A part of a header as text for aiohttp, which writes headers in UTF-8."""
    return value.decode("utf-8", "replace")


def _end_of_connection(response: aiohttp.ClientResponse) -> asyncio.Future[None] | None:
    """How the connection ends, where that is how the body ends; None for bodies that say themselves where they end."""
    headers = response.headers
    is_delimited = "Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower()
    connection = response.connection
    protocol = connection.protocol if connection is not None else None
    if is_delimited or protocol is None:
        return None
    end = protocol.closed
    if end is not None:
        # An end that nobody asks about would be logged.
        end.add_done_callback(lambda ended: ended.exception())
    return end
