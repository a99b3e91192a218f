"""The body of a client's request, read within limits of its size and of its time."""

from __future__ import annotations

import asyncio
import math
import time

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from kvferry.errors import RequestError

# The rest of a body may still come: the connection is of no use for another request.
CLOSE = {"connection": "close"}


async def read_body(http: Request, max_bytes: int, stall_s: float, deadline_s: float = math.inf) -> bytes:
    """The body. Raises ClientDisconnect, or HTTPException: 413 as soon as it is known to be longer than `max_bytes`,
    408 when nothing of it comes for `stall_s` seconds, 504 at `deadline_s` (monotonic time)."""
    announced = http.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(f"{announced} bytes", max_bytes)
    body = bytearray()
    while True:
        message = await _message(http, stall_s, deadline_s)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(f"{announced} bytes" if announced else f"more than {max_bytes} bytes", max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def _message(http: Request, stall_s: float, deadline_s: float) -> Message:
    left_s = deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(min(stall_s, left_s)):
            return await http.receive()
    except TimeoutError:
        if left_s <= stall_s:
            raise HTTPException(504, headers=CLOSE) from None
        found = f"nothing more of it for {stall_s:g} s"
        words = RequestError("the body does not come to its end", found=found, expected="the whole body")
        raise HTTPException(408, str(words), CLOSE) from None


def _too_large(found: str, max_bytes: int) -> HTTPException:
    expected = f"at most {max_bytes} bytes"
    words = RequestError("the body is too large", found=found, expected=expected, hint="a shorter prompt")
    return HTTPException(413, str(words))
