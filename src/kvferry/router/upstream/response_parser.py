"""One HTTP/1.1 answer as it arrives: bytes in, head and body out. Pure; llhttp parses, by way of httptools."""

from __future__ import annotations

import httptools

from kvferry.errors import PeerError

# As many bytes may come that are no part of a body: a head, trailers, what surrounds chunks.
MAX_IDLE_BYTES = 1 << 16


class Reply:
    """The answer to one request that was no HEAD.

    `status` is 0 until the head is there, `headers` are as they came. `is_whole` says that nothing more belongs to it,
    and then `can_go_on` whether its connection may carry another exchange. `num_waiting_bytes` of the body have
    arrived and were not taken.
    """

    __slots__ = (
        "_ends_with_connection",
        "_num_idle_bytes",
        "_parser",
        "_pieces",
        "can_go_on",
        "headers",
        "is_whole",
        "num_waiting_bytes",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False
        self.can_go_on = False
        self.num_waiting_bytes = 0
        # It knows us, too: whoever is done lets go of it, so that nothing is left for the garbage collector.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._ends_with_connection = False
        self._num_idle_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what has arrived. Raises PeerError when that is no HTTP, or a head without an end."""
        if self._parser is None:
            self.can_go_on = False
            return
        self._num_idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.can_go_on = False
            if not self.is_whole:
                raise PeerError("an upstream does not speak HTTP/1.1", found=repr(error)) from error
        if self.is_whole:
            self._parser = None
        if self._num_idle_bytes > MAX_IDLE_BYTES and not self.is_whole:
            raise PeerError("the head of an answer is too long", expected=f"at most {MAX_IDLE_BYTES} bytes")

    def end(self) -> None:
        """The connection has ended: for some answers that is their end, the others will never be whole."""
        self.can_go_on, self._parser = False, None
        self.is_whole = self.is_whole or self._ends_with_connection

    def take(self) -> bytes:
        """All of the body that is waiting; empty when nothing is."""
        pieces, self._pieces, self.num_waiting_bytes = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # What the parser calls.

    def on_message_begin(self) -> None:
        # Nobody has asked for a second answer.
        self.can_go_on = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code() if self._parser else 0
        if self.is_whole:
            return
        if status < 200:
            # Such as `100 Continue`: the answer itself follows.
            self.headers.clear()
            return
        self.status, self._num_idle_bytes = status, 0
        self._ends_with_connection = not _is_delimited(self.headers)

    def on_body(self, data: bytes) -> None:
        if not self.is_whole:
            self._pieces.append(data)
            self.num_waiting_bytes += len(data)
            self._num_idle_bytes = 0

    def on_message_complete(self) -> None:
        if self.status and not self.is_whole:
            self.is_whole = True
            self.can_go_on = self._parser is not None and self._parser.should_keep_alive()


def _is_delimited(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the body says itself where it ends."""
    return any(
        name.lower() == b"content-length" or (name.lower() == b"transfer-encoding" and b"chunked" in value.lower())
        for name, value in headers
    )
