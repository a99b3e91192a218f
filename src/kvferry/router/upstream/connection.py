"""One HTTP/1.1 connection to an upstream; it carries one exchange at a time."""

from __future__ import annotations

import asyncio
from typing import cast

from kvferry.errors import PeerError
from kvferry.router.upstream.response_parser import Reply

# An engine that writes faster than the client reads is left waiting from here on.
HIGH_WATER_BYTES = 1 << 18


class Connection(asyncio.Protocol):
    """Made by the event loop. What goes wrong is raised where somebody waits: ConnectionResetError, or PeerError."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # None while nobody has asked for anything.
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        return self._error is None and not self._transport.is_closing()

    @property
    def can_go_on(self) -> bool:
        """Whether another request may be sent: the last one has gone out, its answer has come, and nobody has left."""
        reply = self._reply
        if reply is None or not reply.can_go_on or not self.is_open:
            return False
        return not reply.num_waiting_bytes and not self._transport.get_write_buffer_size()

    def send(self, head: bytes, body: bytes) -> Reply:
        """Write a request; what the upstream answers will be in the reply. Raises ConnectionResetError: it has left."""
        if not self.is_open:
            raise ConnectionResetError("the connection was closed before it was used")
        reply = self._reply = Reply()
        self._transport.writelines((head, body) if body else (head,))
        return reply

    async def more(self) -> None:
        """Wait until more of the reply has arrived."""
        if self._error is not None:
            # What is raised refers to whoever waits, which refers to us: it is not kept.
            error, self._error = self._error, ConnectionResetError("the connection was closed")
            try:
                raise error
            finally:
                del error
        self._go_on_reading()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def rest(self) -> None:
        """The answer has been read: whatever comes now ends the connection."""
        self._reply = None
        self._go_on_reading()

    def close(self) -> None:
        """End it at once, whatever was still to be sent or to come. May be called again."""
        self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, and another base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:
            self.close()
            return
        try:
            reply.feed(data)
        except PeerError as error:
            self._fail(error)
            self.close()
            return
        if reply.num_waiting_bytes > HIGH_WATER_BYTES and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The upstream has closed it in order: for some answers that is the end. No other one is: not a broken
        connection, and not one that we have closed."""
        if self._reply is not None:
            self._reply.end()
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        reset = ConnectionResetError(str(error) if error else "the connection was closed")
        reset.__cause__ = error
        self._fail(reset)

    def _go_on_reading(self) -> None:
        if self._is_paused and self.is_open:
            self._is_paused = False
            self._transport.resume_reading()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
