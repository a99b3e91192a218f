"""A stand-in for llm-d's routing sidecar with its connector for SGLang, which is written in Go.

It follows `pkg/sidecar/proxy/connector_sglang.go`, and of the files beside it what a request of that connector passes
(`chat_completions.go`, `proxy.go`, `proxy_helpers.go`, `errors.go`), of llm-d/llm-d-router at commit
ebab687927f5331c1b39defcb579a07951bce56c. It sits in front of a decode server. Whoever sends a request names a prefill
server in a header; then both servers get the same body, with the same room, at once. The decode server's answer is the
client's, nobody looks at the other one, and a client that leaves ends the request to the decode server only.

Left out are TLS, tracing, allow lists, data parallelism and the other connectors. What goes through Go's JSON comes out
with sorted keys, and with numbers as double floats have them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

PREFILL_HEADER = "x-prefiller-host-port"
BOOTSTRAP_PORT = "SGLANG_BOOTSTRAP_PORT"
DEFAULT_BOOTSTRAP_PORT = 8998
HOP_BY_HOP = frozenset(
    (
        *("connection", "proxy-connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
MAX_BODY_BYTES = 1 << 28
NOT_READY = (
    "The decode node is not ready. Please check that the vLLM service is running and the port configuration is correct."
)


class Sidecar:
    """In front of the decode server at `decoder`."""

    def __init__(self, decoder: str, bootstrap_port: int) -> None:
        self._decoder = decoder
        self._bootstrap_port = bootstrap_port
        self._prefills: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._connected)
        app.router.add_get("/health", self.health, allow_head=False)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_route("*", "/{path:.*}", self.decode_only)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._http:
            yield

    async def health(self, _: web.Request) -> web.Response:
        """Its own, not that of the server behind it."""
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        named = request.headers.getall(PREFILL_HEADER, [])
        hosts = named[0].split(",") if len(named) == 1 else named
        prefill = hosts[0].strip() if hosts else ""
        if not prefill:
            return await self.decode_only(request)
        try:
            asked = json.loads(await request.read(), parse_int=_as_double)
        except ValueError as error:
            return _error(400, "BadRequestError", f"failed to parse request body: {error}")
        body = json.dumps({**asked, **self._bootstrap(prefill)}, sort_keys=True).encode()
        # Of the handler's own cancellation, when the client leaves, this task hears nothing.
        prefilling = asyncio.create_task(self._prefill(request, prefill, body))
        self._prefills.add(prefilling)
        prefilling.add_done_callback(self._prefills.discard)
        return await self._decode(request, body)

    async def decode_only(self, request: web.Request) -> web.StreamResponse:
        return await self._decode(request, await request.read())

    def _bootstrap(self, prefill: str) -> dict[str, Any]:
        room = time.time_ns() + random.randrange(1000)
        return {"bootstrap_host": _host_of(prefill), "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}

    async def _prefill(self, request: web.Request, prefill: str, body: bytes) -> None:
        url = f"http://{prefill.removeprefix('http://')}{request.path_qs}"
        try:
            async with self._http.post(url, data=body, headers=_passed(request)) as response:
                await response.read()
        except aiohttp.ClientError:
            # It is only traced.
            return

    async def _decode(self, request: web.Request, body: bytes) -> web.StreamResponse:
        url = f"{self._decoder}{request.path_qs}"
        try:
            async with self._http.request(request.method, url, data=body, headers=_passed(request)) as upstream:
                return await _relayed(request, upstream)
        except aiohttp.ClientConnectorError:
            return _error(503, "ServiceUnavailable", NOT_READY)
        except aiohttp.ClientError as error:
            return _error(502, "BadGateway", str(error))


async def _relayed(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pieces as they come, which of Go's proxy is so for event streams."""
    headers = [(name, value) for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP]
    response = web.StreamResponse(status=upstream.status)
    for name, value in headers:
        response.headers.add(name, value)
    await response.prepare(request)
    async for piece in upstream.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def _passed(request: web.Request) -> dict[str, str]:
    """The caller's headers but those of this hop, and that which names a prefill server."""
    left_out = HOP_BY_HOP | {PREFILL_HEADER, "content-length", "host"}
    kept = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
    return {**kept, "X-Forwarded-For": request.remote or ""}


def _host_of(place: str) -> str:
    """The host of `host:port`; what is of another form is taken as it is."""
    place = place.removeprefix("http://")
    host, colon, _ = place.rpartition(":")
    is_place = bool(colon) and (":" not in host or (host.startswith("[") and host.endswith("]")))
    return host.strip("[]") if is_place else place


def _as_double(digits: str) -> int:
    """An integer behind a double float."""
    return int(float(digits))


def _error(status: int, kind: str, message: str) -> web.Response:
    body = {"object": "error", "message": message, "type": kind, "param": "", "code": status}
    return web.json_response(body, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for llm-d's routing sidecar, for SGLang.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decoder", required=True, help="URL of the decode server")
    options = parser.parse_args()
    port = int(os.environ.get(BOOTSTRAP_PORT) or DEFAULT_BOOTSTRAP_PORT)
    app = Sidecar(options.decoder.rstrip("/"), port).app()
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
