"""The client's side of a request, in ASGI messages."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Send

from kvferry.openai import error_event
from kvferry.router.headers import Headers

__all__ = ["CLIENT_LEFT", "Client"]

# The status that counts a client who did not wait for one.
CLIENT_LEFT = 499


class Client:
    """`gone` is a task that ends when the client has left; `status` is what it was told, 499 if nothing yet."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.status = CLIENT_LEFT
        self.gone = asyncio.create_task(_wait_until_gone(receive))
        self._send = send
        self._tail = b""

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, data: bytes) -> None:
        """More of the body."""
        self._tail = (self._tail + data)[-4:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """The end of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def finish_with_error(self, message: str, code: str, reason: str) -> None:
        """End an event stream with an error frame.

        Half a frame may have gone out already: a blank line ends it, so that ours is a frame of its own.
        """
        at_frame_start = not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))
        await self.finish((b"" if at_frame_start else b"\n\n") + error_event(message, code, reason))


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
