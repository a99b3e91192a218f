"""What our HTTP servers, and vLLM's with our middleware, answer alike."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive

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
