"""The client's side of a request, in ASGI messages."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Message, Receive, Send

from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, until_disconnected
from kvferry.router.request.headers import Headers

NOT_SENDING = math.inf

Outcome = TypeVar("Outcome")


class Client:
    """`has_left` says that nobody waits any more; `status` is what the client was told, 499 if nothing yet.

    A client that takes nothing for `stall_s`, or until `deadline_s` (monotonic time), while there is something for it
    has left as well: it would keep its engine's place for as long as it likes.
    """

    def __init__(self, receive: Receive, send: Send, stall_s: float = math.inf, deadline_s: float = math.inf) -> None:
        self.status = CLIENT_CLOSED_REQUEST
        self.has_left = False
        self._send = send
        self._stall_s, self._deadline_s = stall_s, deadline_s
        self._sends_since_s = NOT_SENDING
        self._stall_watch: asyncio.TimerHandle | None = None
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
            if self._stall_watch is not None:
                self._stall_watch.cancel()
            self._stall_watch = None

    async def _until_left(self, receive: Receive) -> None:
        await until_disconnected(receive)
        self._leave(self._grace_s)

    def _leave(self, grace_s: float) -> None:
        self.has_left = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + grace_s)

    def _watch_stall(self, in_s: float) -> None:
        """Start the one timer of a response, which looks again if it was early: one per piece would cost too much."""
        self._stall_watch = asyncio.get_running_loop().call_later(in_s, self._look_for_stall)

    def _look_for_stall(self) -> None:
        now = time.monotonic()
        left_s = min(self._sends_since_s + self._stall_s, self._deadline_s) - now
        if self._sends_since_s != NOT_SENDING and left_s <= 0:
            self._leave(0.0)
        else:
            self._watch_stall(left_s if 0 < left_s < self._stall_s else self._stall_s)

    async def _tell(self, message: Message) -> None:
        """Send it, and return when there is room for more. It is cut short inside `unless_left` only."""
        self._sends_since_s = time.monotonic()
        if self._stall_watch is None and self._limit is not None and self._stall_s < math.inf:
            self._watch_stall(max(0.0, min(self._stall_s, self._deadline_s - self._sends_since_s)))
        try:
            await self._send(message)
        finally:
            self._sends_since_s = NOT_SENDING

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._tell({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, data: bytes) -> None:
        """Send more of the body."""
        self._tail = (self._tail + data)[-4:]
        await self._tell({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        """Send the end of the body."""
        await self._tell({"type": "http.response.body", "body": data, "more_body": False})

    async def finish_with_event(self, event: bytes) -> None:
        """End an event stream with a frame of ours.

        Half a frame may have gone out already: a blank line ends it, so that ours is a frame of its own.
        """
        at_frame_start = not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))
        await self.finish((b"" if at_frame_start else b"\n\n") + event)
