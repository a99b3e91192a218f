"""`connector_sglang.go`: both servers get one body with one room at once; nobody looks at the prefill server's answer.

A client that leaves ends the request to the decode server only.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import aiohttp
from aiohttp import web

from llm_d import json_of_go
from llm_d.proxy import Forwarding, error

BOOTSTRAP_PORT = "SGLANG_BOOTSTRAP_PORT"
DEFAULT_BOOTSTRAP_PORT = 8998


class SGLang:
    """The connector `sglang`."""

    def __init__(self) -> None:
        self._bootstrap_port = int(os.environ.get(BOOTSTRAP_PORT) or DEFAULT_BOOTSTRAP_PORT)
        self._prefills: set[asyncio.Task[None]] = set()

    async def __call__(self, forwarding: Forwarding, body: bytes, prefill: str) -> web.StreamResponse:
        try:
            asked = json_of_go.loads(body)
        except ValueError as invalid:
            return error(400, "BadRequestError", f"failed to parse request body: {invalid}")
        both = json_of_go.dumps({**asked, **self._bootstrap(prefill)})
        # Of the handler's own cancellation, when the client leaves, this task hears nothing.
        prefilling = asyncio.create_task(self._prefill(forwarding, prefill, both))
        self._prefills.add(prefilling)
        prefilling.add_done_callback(self._prefills.discard)
        return await forwarding.to_decode(both)

    def _bootstrap(self, prefill: str) -> dict[str, Any]:
        room = time.time_ns() + random.randrange(1000)
        return {"bootstrap_host": _host_of(prefill), "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}

    async def _prefill(self, forwarding: Forwarding, prefill: str, body: bytes) -> None:
        try:
            async with forwarding.to_prefill(prefill, body) as response:
                await response.read()
        except aiohttp.ClientError:
            # It is only traced.
            return


def _host_of(place: str) -> str:
    """The host of `host:port`; what is of another form is taken as it is."""
    place = place.removeprefix("http://")
    host, colon, _ = place.rpartition(":")
    is_place = bool(colon) and (":" not in host or (host.startswith("[") and host.endswith("]")))
    return host.strip("[]") if is_place else place
