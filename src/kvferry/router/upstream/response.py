"""An engine's response as it arrives."""

from __future__ import annotations

import asyncio

import aiohttp

from kvferry.errors import PeerError
from kvferry.router.request.headers import Headers


class HttpResponse:
    """Raises only FAILURES; `close` it in the end. `is_over` says that the last piece of the body has been taken."""

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
        """aiohttp takes any end of the connection for the end of a body that has no length: only one in order is."""
        if self._end_of_connection is None:
            return
        if self._is_closed or not self._end_of_connection.done():
            raise ConnectionResetError("the connection was closed")
        self._end_of_connection.result()


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
