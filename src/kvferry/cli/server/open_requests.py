"""The open requests of an ASGI application: their number, and an error for each client when they are cancelled."""

from __future__ import annotations

import asyncio
import math

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.http.anthropic import error_event_for, error_for
from kvferry.http.openai import SERVER_ERROR, SSE_MEDIA_TYPE, error_body

WORDS = "the server is shutting down"
CODE = "server_ended"


class OpenRequests:
    """An ASGI application that counts the open requests of another, and can break them off.

    A server that cancels them would leave a client with half a stream, of which nothing says that it is half.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: set[asyncio.Task[object]] = set()
        self._is_over = False
        self._last_at = -math.inf
        self.none_open = asyncio.Event()
        self.none_open.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def came_within(self, seconds: float) -> bool:
        """Whether a request is open, or has come in so many last seconds."""
        return bool(self._open) or asyncio.get_running_loop().time() - self._last_at < seconds

    def break_off(self) -> None:
        """End all that is open: an error where nothing has been answered yet, an error event at the end of a stream."""
        self._is_over = True
        for task in self._open:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        self._last_at = asyncio.get_running_loop().time()
        self._open.add(task)
        self.none_open.clear()
        try:
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            await answer.break_off(scope, receive)
        finally:
            self._open.discard(task)
            if not self._open:
                self.none_open.set()


class _Answer:
    """Passes on what an application sends, and knows how far it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._is_over = False
        self._is_event_stream = False
        # Only behind a whole frame another one can be read.
        self._tail = b"\n\n"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_event_stream = kind.startswith(SSE_MEDIA_TYPE.encode())
        elif body := message.get("body", b""):
            self._tail = (self._tail + body)[-4:]
        self._is_over = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, scope: Scope, receive: Receive) -> None:
        if not self._has_begun:
            refusal = JSONResponse(error_for(scope["path"], error_body(WORDS, SERVER_ERROR, CODE, None)), 503)
            await refusal(scope, receive, self._send)
        elif self._is_event_stream and self._tail.endswith((b"\n\n", b"\r\n\r\n")) and not self._is_over:
            await self._send({"type": "http.response.body", "body": error_event_for(scope["path"], WORDS, CODE)})
