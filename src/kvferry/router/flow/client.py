"""The client's side of a request, in ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive, Send

from kvferry.http.asgi import until_disconnected
from kvferry.router.request.headers import Headers

# The status under which a request is counted whose client did not wait for one.
CLIENT_CLOSED_REQUEST = 499

Outcome = TypeVar("Outcome")


class Client:
    """`has_left` says that nobody waits any more; `status` is what the client was told, 499 if nothing yet."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.status = CLIENT_CLOSED_REQUEST
        self.has_left = False
        self._send = send
        self._tail = b""
        # It ends by itself: servers send `http.disconnect` after a response too. Cancelling it would leave a cycle.
        self._watch = asyncio.create_task(self._until_left(receive))
        # The time limit of the work that the client waits for, and how long that may go on without the client.
        self._limit: asyncio.Timeout | None = None
        self._grace_s = 0.0

    async def unless_left(self, work: Callable[[], Awaitable[Outcome]], grace_s: float) -> Outcome | None:
        """The outcome of `work`, which is cancelled `grace_s` after the client has left: then it is None."""
        if self.has_left:
            return None
        try:
            async with asyncio.timeout(None) as limit:
                self._limit, self._grace_s = limit, grace_s
                return await work()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._limit = None

    async def _until_left(self, receive: Receive) -> None:
        await until_disconnected(receive)
        self.has_left = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._grace_s)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, data: bytes) -> None:
        """Send more of the body."""
        self._tail = (self._tail + data)[-4:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def finish_with_event(self, event: bytes) -> None:
        """End an event stream with a frame of ours.

        Half a frame may have gone out already: a blank line ends it, so that ours is a frame of its own.
        """
        at_frame_start = not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))
        await self.finish((b"" if at_frame_start else b"\n\n") + event)
