"""One exchange with one upstream, and its failures as short labels."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import PeerError, TransportError
from kvferry.router.events import INSTANCE_DOWN, PREFILL_LOST, TOO_LATE
from kvferry.router.request.headers import Headers
from kvferry.router.upstream.connection import Connection
from kvferry.router.upstream.connection_pool import Origin, Pool, UnreachableError, origin_of
from kvferry.router.upstream.response_parser import Reply

REFUSED, UNREACHABLE, CONNECT_TIMEOUT = "refused", "unreachable", "connect_timeout"
RESET, MALFORMED = "reset", "malformed"
DEADLINE, STALL = "deadline", "stall"

# The reasons that say that nobody is there. A connection that breaks may be the end of one request alone.
GONE = frozenset((REFUSED, UNREACHABLE, CONNECT_TIMEOUT))

# What a client is told. The error itself names hosts and ports of the inside, so it goes to the log.
WORDS = {
    REFUSED: "it cannot be reached",
    UNREACHABLE: "its host cannot be reached",
    CONNECT_TIMEOUT: "it did not accept the connection in time",
    RESET: "its connection broke",
    MALFORMED: "it does not speak the protocol",
    DEADLINE: "it took too long",
    STALL: "it sent nothing for too long",
    INSTANCE_DOWN: "it does not answer any more",
    PREFILL_LOST: "the prompt was not computed",
    TOO_LATE: "the request's own time limit is over",
}

# Everything that an upstream can make an exchange raise.
FAILURES = (OSError, PeerError)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to an upstream: `base` is the URL of an instance, `target` path and query, already encoded."""

    method: str
    base: str
    target: str
    headers: Headers
    body: bytes


class Exchange:
    """One request and its response as it arrives. Raises only `FAILURES`; `close` it in the end."""

    def __init__(self, pool: Pool, origin: Origin, connection: Connection, reply: Reply) -> None:
        self._pool, self._origin, self._connection, self._reply = pool, origin, connection, reply
        # The last piece has been taken.
        self.is_over = False
        self._has_let_go = False

    @classmethod
    async def open(cls, pool: Pool, outgoing: Outgoing) -> Exchange:
        """Send a request and wait for the head of its response. Cancelling it closes the connection.

        Whoever only asks (GET) asks on a connection of its own: a probe is to find out whether there is one.
        """
        origin = origin_of(outgoing.base)
        head = _head(origin, outgoing, pool.authorization)
        connection = await (pool.connect(origin) if outgoing.method == "GET" else pool.take(origin))
        exchange = cls(pool, origin, connection, connection.send(head, outgoing.body))
        try:
            await exchange._until_head()
        except BaseException:
            # Also when it is cancelled in the moment in which the head has come: nobody else knows of it.
            exchange.close()
            raise
        return exchange

    @property
    def status(self) -> int:
        return self._reply.status

    @property
    def headers(self) -> Headers:
        return self._reply.headers

    @property
    def is_plain_event_stream(self) -> bool:
        """Whether a server-sent event may be added: an uncompressed event stream of no announced length."""
        headers = {name.lower(): value.lower() for name, value in self._reply.headers}
        is_event_stream = headers.get(b"content-type", b"").partition(b";")[0].strip() == b"text/event-stream"
        encoded = headers.get(b"content-encoding", b"identity") != b"identity"
        return is_event_stream and not encoded and b"content-length" not in headers

    async def piece(self) -> bytes:
        """The bytes that have arrived, at least one; empty at the end of the body."""
        reply = self._reply
        while not reply.num_waiting_bytes and not reply.is_whole:
            await self._connection.more()
        piece = reply.take()
        if reply.is_whole:
            self._let_go()
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
        """Close the connection, whatever is still to come on it; one that has nothing more to come is kept."""
        if not self._has_let_go:
            self._has_let_go = True
            self._connection.close()

    async def _until_head(self) -> None:
        while not self._reply.status:
            await self._connection.more()

    def _let_go(self) -> None:
        self.is_over = True
        if not self._has_let_go:
            self._has_let_go = True
            self._pool.give_back(self._origin, self._connection)


def reason_of(error: BaseException, timeout_reason: str) -> str:
    """The label of a failure; `timeout_reason` is the one of a time limit that was the caller's own."""
    match error:
        case TransportError():
            return CONNECT_TIMEOUT
        case ConnectionRefusedError():
            return REFUSED
        case UnreachableError():
            return UNREACHABLE
        case TimeoutError():
            return timeout_reason
        case OSError():
            return RESET
        case _:
            return MALFORMED


def _head(origin: Origin, outgoing: Outgoing, authorization: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Header values came through a parser, or are ours: they hold no line ends."""
    target = (origin.prefix + outgoing.target).encode("latin-1")
    parts = [outgoing.method.encode(), b" ", target, b" HTTP/1.1\r\nhost: ", origin.host_header, b"\r\n"]
    headers = outgoing.headers
    if authorization:
        headers = [*(pair for pair in headers if pair[0].lower() != b"authorization"), *authorization]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if outgoing.method != "GET":
        parts.append(b"content-length: %d\r\n" % len(outgoing.body))
    parts.append(b"\r\n")
    return b"".join(parts)
