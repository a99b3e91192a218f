"""What the sidecar does with every request: where it goes, which headers go along, and how an answer comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from llm_d import json_of_go

PREFILL_HEADER = "x-prefiller-host-port"
# They are for the sidecar, and no server sees them.
OWN_HEADERS = frozenset((PREFILL_HEADER, "x-encoder-hosts-ports", "x-kv-cache-source-host-port"))
HOP_BY_HOP = frozenset(
    (
        *("connection", "proxy-connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
FORWARDED = "x-forwarded-for"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")
MAX_BODY_BYTES = 1 << 28
NOT_READY = (
    "The decode node is not ready. Please check that the vLLM service is running and the port configuration is correct."
)
Pieces = AsyncIterator[bytes]


class Connector(Protocol):
    """What becomes of a request that names a prefill server."""

    async def __call__(self, forwarding: Forwarding, body: bytes, prefill: str) -> web.StreamResponse: ...


@dataclass(frozen=True, slots=True)
class Forwarding:
    """One request on its way to the servers."""

    request: web.Request
    http: aiohttp.ClientSession
    decoder: str
    added: tuple[tuple[str, str], ...] = ()

    def to_prefill(self, prefill: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = f"http://{prefill.removeprefix('http://')}{self.request.path_qs}"
        return self.http.request(self.request.method, url, data=body, headers=self._headers())

    async def to_decode(
        self, body: bytes, edited: Callable[[aiohttp.ClientResponse], Pieces] | None = None
    ) -> web.StreamResponse:
        """The decode server's answer is the client's, as it comes, or as `edited` makes of it."""
        url = f"{self.decoder}{self.request.path_qs}"
        try:
            async with self.http.request(self.request.method, url, data=body, headers=self._headers()) as upstream:
                if edited is None:
                    return await self._relayed(upstream, upstream.content.iter_any(), frozenset())
                return await self._relayed(upstream, edited(upstream), frozenset(("content-length",)))
        except aiohttp.ClientConnectorError:
            return error(503, "ServiceUnavailable", NOT_READY)
        except aiohttp.ClientPayloadError:
            # The head of the answer is out: Go ends the connection.
            if self.request.transport is not None:
                self.request.transport.abort()
            raise
        except aiohttp.ClientError as failed:
            return error(502, "BadGateway", str(failed))

    async def _relayed(
        self, upstream: aiohttp.ClientResponse, pieces: Pieces, dropped: frozenset[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers=kept_headers(upstream, dropped))
        await response.prepare(self.request)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    def _headers(self) -> CIMultiDict[str]:
        """The caller's but those of this hop, and the added ones behind those of the same name."""
        left_out = HOP_BY_HOP | OWN_HEADERS | {"content-length", FORWARDED}
        # aiohttp's client keeps the last of two headers whose names differ in their case.
        named = ((name.lower(), value) for name, value in self.request.headers.items())
        headers = CIMultiDict((name, value) for name, value in named if name not in left_out)
        for name, value in self.added:
            headers.add(name, value)
        hops = (*self.request.headers.getall(FORWARDED, []), self.request.remote or "")
        headers[FORWARDED] = ", ".join(hops)
        return headers


class Sidecar:
    """In front of the decode server at `decoder`."""

    def __init__(self, decoder: str, connector: Connector) -> None:
        self._decoder = decoder
        self._connector = connector

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._connected)
        app.router.add_get("/health", self.health)
        for path in GENERATING:
            app.router.add_post(path, self.generate)
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
        return await self._connector(self._forwarding(request), await request.read(), prefill)

    async def decode_only(self, request: web.Request) -> web.StreamResponse:
        return await self._forwarding(request).to_decode(await request.read())

    def _forwarding(self, request: web.Request) -> Forwarding:
        return Forwarding(request, self._http, self._decoder)


def kept_headers(upstream: aiohttp.ClientResponse, dropped: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    left_out = HOP_BY_HOP | dropped
    return CIMultiDict((key, value) for key, value in upstream.headers.items() if key.lower() not in left_out)


def error(status: int, kind: str, message: str) -> web.Response:
    """As vLLM's, but that Go guesses the type of the content."""
    body: dict[str, Any] = {"object": "error", "message": message, "type": kind, "param": "", "code": status}
    return web.Response(status=status, body=json_of_go.dumps(body), content_type="text/plain", charset="utf-8")
