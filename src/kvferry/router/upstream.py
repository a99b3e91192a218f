"""The border to aiohttp: one exchange with one upstream, its failures as short labels."""

from __future__ import annotations

import io
from dataclasses import dataclass

import aiohttp
from yarl import URL

from kvferry.errors import PeerError
from kvferry.router.config import RouterConfig
from kvferry.router.headers import Headers

__all__ = ["DEADLINE", "FAILURES", "GONE", "STALL", "WORDS", "Exchange", "Outgoing", "open_session", "reason_of"]

REFUSED, CONNECT_TIMEOUT, RESET, MALFORMED = "refused", "connect_timeout", "reset", "malformed"
DEADLINE, STALL = "deadline", "stall"

# The reasons that say something about the instance rather than about one request.
GONE = frozenset((REFUSED, CONNECT_TIMEOUT, RESET))

# How long an idle connection is kept for the next leg.
KEPT_S = 2.0
LARGE_BYTES = 1 << 19

# What a client is told. The error itself names hosts and ports of the inside, so it goes to the log.
WORDS = {
    REFUSED: "it cannot be reached",
    CONNECT_TIMEOUT: "it did not accept the connection in time",
    RESET: "its connection broke",
    MALFORMED: "it does not speak the protocol",
    DEADLINE: "it took too long",
    STALL: "it fell silent",
}

# Everything that an upstream can make an exchange raise.
FAILURES = (aiohttp.ClientError, OSError, PeerError)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to an upstream; `url` is absolute and already encoded."""

    method: str
    url: str
    headers: Headers
    body: bytes


def open_session(config: RouterConfig) -> aiohttp.ClientSession:
    """The client of one app; the caller closes it. Must be called in the app's event loop.

    Connections are kept for less time than servers keep theirs (vLLM: 5 s): one that the upstream closes in the moment
    of its next use looks like a broken engine.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
        timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    )


class Exchange:
    """One request and its response as it arrives. Raises only `FAILURES`; `close` it in the end."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @classmethod
    async def open(cls, session: aiohttp.ClientSession, outgoing: Outgoing) -> Exchange:
        """Send a request and wait for the head of its response. Cancelling it closes the connection."""
        response = await session.request(
            outgoing.method,
            URL(outgoing.url, encoded=True),
            headers=[(_text(name), _text(value)) for name, value in outgoing.headers],
            data=_payload(outgoing.body),
            allow_redirects=False,
        )
        return cls(response)

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return self._response.raw_headers

    @property
    def is_plain_event_stream(self) -> bool:
        """Whether a server-sent event may be added: an uncompressed event stream of no announced length."""
        headers = self._response.headers
        encoded = headers.get("Content-Encoding", "identity").lower() != "identity"
        is_event_stream = self._response.content_type == "text/event-stream"
        return is_event_stream and not encoded and "Content-Length" not in headers

    async def piece(self) -> bytes:
        """The bytes that have arrived, at least one; empty at the end of the body."""
        return await self._response.content.readany()

    async def whole(self, max_bytes: int) -> bytes:
        """The whole body. Raises PeerError when it is longer than `max_bytes`."""
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > max_bytes:
                raise PeerError("an answer is too long", found="more", expected=f"at most {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """Close the connection, whatever is still to come on it."""
        self._response.close()


def reason_of(error: BaseException, timeout_reason: str) -> str:
    """The label of a failure; `timeout_reason` is the one of a time limit that was the caller's own."""
    match error:
        case aiohttp.ConnectionTimeoutError() | aiohttp.SocketTimeoutError():
            return CONNECT_TIMEOUT
        case aiohttp.ClientConnectorError():
            return REFUSED
        case TimeoutError():
            return timeout_reason
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return RESET
        case _:
            return MALFORMED


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Large bodies as a stream: aiohttp warns of those given as bytes. Small ones are cheaper as they are."""
    if not body:
        return None
    return body if len(body) < LARGE_BYTES else io.BytesIO(body)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
