"""A real server for one engine, and the plainest of clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage
from typing import Any

import uvicorn
from embedded_loopback import Loopback
from embedded_support import DEADLINE_S
from starlette.applications import Starlette

from kvferry.embedded.engine.async_engine import Engine

REPORT = {"x-kvferry-report": "true"}


@dataclass(frozen=True, slots=True)
class Told:
    """A whole response."""

    status: int
    headers: HTTPMessage
    text: str


@dataclass(frozen=True, slots=True)
class Served:
    """One engine process as a client and a test see it."""

    engine: Engine
    transfer: Loopback
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """POST a body (GET without one); returns status and JSON, with a report if there is one."""
        status, answer = self.raw(path, body, REPORT | (headers or {}))
        return status, json.loads(answer)

    def raw(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        response = self.response(path, body, headers)
        return response.status, response.text

    def response(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> Told:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        response = connection.getresponse()
        told = Told(response.status, response.headers, response.read().decode())
        connection.close()
        return told

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; the last one must be `[DONE]` and is left out."""
        status, answer = self.raw(path, body | {"stream": True}, REPORT)
        frames = answer.removesuffix("\n\n").split("\n\n")
        assert status == 200
        assert frames.pop() == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def metric(self, name: str) -> float:
        _, text = self.raw("/metrics")
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)


@asynccontextmanager
async def serve(app: Starlette) -> AsyncIterator[int]:
    """Serve on a free port of this machine; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none", timeout_keep_alive=65))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()
