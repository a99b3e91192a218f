"""What our HTTP servers, and vLLM's with our middleware, answer alike."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""The status under which a request is counted whose client did not wait for one."""


def json_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    """A whole JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def server_timing(phases_s: Mapping[str, float]) -> str:
    """The value of a `Server-Timing` header: milliseconds."""
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in phases_s.items())


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of the work. Raises ClientDisconnect if the client leaves first: the work has then been cancelled, and
    has cleaned up."""
    working, watching = asyncio.create_task(work), asyncio.create_task(until_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # does nothing to work that is done
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        raise ClientDisconnect
    return working.result()


def without_root(app: ASGIApp) -> ASGIApp:
    """The application where it is mounted below another path: it sees its own paths alone, as its guards have to."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "").rstrip("/")
        if scope["type"] != "lifespan" and root and scope["path"].startswith(f"{root}/"):
            scope = {**scope, "root_path": "", "path": scope["path"].removeprefix(root)}
        await app(scope, receive, send)

    return stripped
