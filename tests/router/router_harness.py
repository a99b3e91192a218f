"""Real sockets for the router's tests: a uvicorn router and engines that answer as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from multidict import CIMultiDict

from kvferry.http.request_fields import Endpoint
from kvferry.router.config import RouterConfig
from kvferry.router.flow import dispatcher
from kvferry.router.flow.upstream_request import UpstreamRequest
from kvferry.router.http.app import create_app
from kvferry.router.http.tokenize import TokenizerPath
from kvferry.router.telemetry.tracing import NO_TRACING, Tracing

DEADLINE_S = 30.0
STREAM = {"prompt": "a", "stream": True}
TRANSFER = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 1, 2]]}


@dataclass
class Seen:
    """A request as an engine got it."""

    path: str
    headers: CIMultiDict[str]
    raw: bytes

    @property
    def body(self) -> dict:
        return json.loads(self.raw)


Behaviour = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """A fake engine. `behave` answers what is asked of a model; the events tell tests what happened to it."""

    name: str
    behave: Behaviour
    url: str = ""
    health_status: int = 200
    # Engines of others have no `/ready`.
    ready_status: int = 404
    # What kvferry's own engines tell of themselves; others tell nothing.
    info: dict = field(default_factory=dict)
    # What servers of SGLang tell.
    server_info: dict = field(default_factory=dict)
    server_info_status: int = 200
    models: list[dict] = field(default_factory=list)
    models_status: int = 200
    seen: list[Seen] = field(default_factory=list)
    released: asyncio.Queue[dict] = field(default_factory=asyncio.Queue)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path_qs, request.headers.copy(), await request.read())
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self.behave(request, seen)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def health(self, request: web.Request) -> web.Response:
        self.probed.set()
        return web.Response(status=self.health_status)

    async def ready(self, request: web.Request) -> web.Response:
        epoch = self.info.get("epoch", "")
        return web.Response(status=self.ready_status, headers={"x-kvferry-epoch": epoch} if epoch else {})

    async def who(self, request: web.Request) -> web.Response:
        return web.json_response(self.info, status=200 if self.info else 404)

    async def tell_server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server_info, status=self.server_info_status if self.server_info else 404)

    async def release(self, request: web.Request) -> web.Response:
        self.released.put_nowait(await request.json())
        return web.json_response({"released": True})

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models}, status=self.models_status)

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**28)
        for path in (*Endpoint, *TokenizerPath):
            app.router.add_post(path, self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/kvferry/info", self.who)
        app.router.add_get("/server_info", self.tell_server_info)
        app.router.add_post("/kvferry/release", self.release)
        app.router.add_get("/v1/models", self.list_models)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = "http://{}:{}".format(*self.runner.addresses[0])

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()


def answer(text: str, **extra) -> dict:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        **extra,
    }


def chat_chunk(text: str, **extra) -> dict:
    return {
        "id": "chat-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}],
        **extra,
    }


def frame(data: dict) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


ONE, DONE = frame(chat_chunk("one")), b"data: [DONE]\n\n"


def prefilling(engine_id: str) -> Behaviour:
    async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
        params = {**TRANSFER, "remote_engine_id": engine_id}
        return web.json_response(answer("x", kv_transfer_params=params))

    return behave


async def decoding(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Answer `one two`, streamed when asked so, with an extra key that must pass untouched."""
    if not seen.body.get("stream"):
        return web.json_response(answer("one two", kvferry={"moved_bytes": 7}), headers={"x-engine": "yes"})
    response = await open_stream(request)
    for text in ("one", " two"):
        await response.write(frame(chat_chunk(text)))
    await response.write(frame(chat_chunk("", kvferry={"moved_bytes": 7})) + DONE)
    await response.write_eof()
    return response


async def open_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **headers})
    await response.prepare(request)
    return response


def failing(status: int, message: str) -> Behaviour:
    async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
        body = {"error": {"message": message, "type": "engine_error", "param": None, "code": status}}
        return web.json_response(body, status=status, headers={"retry-after": "3"})

    return behave


async def resetting(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Drop the connection without an answer."""
    request.transport.abort()
    return web.Response()


async def hanging(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Never answer; ends by cancellation, when the client leaves."""
    await asyncio.Event().wait()
    return web.Response()


def streaming(*pieces: bytes, **headers: str) -> Behaviour:
    """Stream these pieces."""

    async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await open_stream(request, **headers)
        for piece in pieces:
            await response.write(piece)
        return response

    return behave


def stalling(piece: bytes) -> Behaviour:
    """Stream a piece, and then nothing more."""

    async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
        await streaming(piece)(request, seen)
        return await hanging(request, seen)

    return behave


def breaking(piece: bytes, delivered: asyncio.Event | None = None) -> Behaviour:
    """Stream a piece and drop the connection, not before it is `delivered` where that is given."""

    async def behave(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await streaming(piece)(request, seen)
        if delivered is not None:
            await delivered.wait()
        request.transport.close()
        return response

    return behave


class QuietServer(uvicorn.Server):
    """A server among several in one process: it leaves the signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Reply:
    """A whole answer of the router."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def error(self) -> dict:
        return json.loads(self.raw)["error"]


@dataclass
class Cluster:
    """A router and its engines."""

    prefill: list[Engine]
    decode: list[Engine]
    url: str
    session: aiohttp.ClientSession
    app: object

    async def complete(self, body: object = None, **options) -> Reply:
        """POST a completion and read the whole answer."""
        data = {"model": "tiny", "prompt": "hello", "max_tokens": 9} if body is None else body
        async with self.session.post(self.url + "/v1/completions", json=data, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def metric(self, line: str) -> float:
        """The value of the sample whose name and labels are `line`; 0 when there is none."""
        values = [text.split()[-1] for text in (await self.metrics()).splitlines() if text.startswith(line + " ")]
        return float(values[0]) if values else 0.0

    async def members(self) -> dict:
        """What the router knows of its instances."""
        async with self.session.get(self.url + "/kvferry/members") as response:
            return await response.json()

    async def leave(self, body: object = None) -> None:
        """A client leaves when every engine has a request of its own: all of them end."""
        engines = (*self.prefill, *self.decode)
        asking = asyncio.create_task(self.complete(body))
        await asyncio.gather(*(engine.arrived.wait() for engine in engines))
        asking.cancel()
        await asyncio.gather(*(engine.left.wait() for engine in engines))
        await self.until_idle()

    async def until_health_changes(self) -> None:
        changed = self.app.state.pool.changed
        await changed.wait()
        changed.clear()

    async def until_idle(self) -> None:
        while any(one["in_flight_requests"] for one in (await self.members())["members"]):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(app) -> AsyncIterator[str]:
    """A real server for an ASGI app on a free port; yields its URL at once: early clients wait in the backlog."""
    listener = socket.create_server(("127.0.0.1", 0))
    # A loop that stands still for longer than a client keeps its connection is no reason to end it.
    config = uvicorn.Config(app, log_level="error", lifespan="on", access_log=False, ws="none", timeout_keep_alive=65)
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def cluster(
    prefill: list[Engine], decode: list[Engine], *, tracing: Tracing = NO_TRACING, **limits
) -> AsyncIterator[Cluster]:
    """Start all engines without a URL, and a router in front of all of them; whatever waits in it ends in time."""
    for engine in (*prefill, *decode):
        if not engine.url:
            await engine.start()
    limits = {"probe_interval_s": 3600.0, **limits}
    config = RouterConfig(tuple(e.url for e in prefill), tuple(e.url for e in decode), **limits)
    app = create_app(config, tracing)
    async with asyncio.timeout(DEADLINE_S):
        try:
            async with serving(app) as url, aiohttp.ClientSession() as session:
                async with session.get(url + "/health") as response:
                    assert response.status == 200
                app.state.pool.changed.clear()
                yield Cluster(prefill, decode, url, session, app)
        finally:
            for engine in (*prefill, *decode):
                await engine.stop()


def record_limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each request to an engine may take, filled as they are sent."""
    given = []

    class Recording(UpstreamRequest):
        def __init__(self, services, reservation, trace, outgoing, timeouts, usage):
            given.append(timeouts.limit_s)
            super().__init__(services, reservation, trace, outgoing, timeouts, usage)

    monkeypatch.setattr(dispatcher, "UpstreamRequest", Recording)
    return given


def prefill_engine(name: str = "p0", behave: Behaviour | None = None) -> Engine:
    return Engine(name, behave or prefilling(name))


def decode_engine(name: str = "d0", behave: Behaviour = decoding) -> Engine:
    return Engine(name, behave)
