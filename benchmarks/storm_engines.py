"""Very many engines in one process, each with a port of its own, which compute nothing and register like real ones.

`python benchmarks/storm_engines.py NUMBER TOKENS GAP_MS` prints their ports, then does what it is told on its standard
input, a line of JSON after the other, and answers each with one. The first half of them are prefill engines.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

import uvloop
from aiohttp import ClientSession
from router_engine import Connection, whole

from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.http.registration import Announcement, Side

# A thousand engines share a core here, so their calls may last longer than those of engines with one of their own.
PATIENCE_S = 60.0
DRAIN_S = 30.0
POLL_S = 0.02


class TimedRegistrar(Registrar):
    """Says how long each of its calls took, and when a router first knew the engine."""

    def __init__(self, config: RegistrarConfig) -> None:
        super().__init__(config)
        self.calls_s: list[float] = []
        self.is_known = asyncio.Event()

    async def _tell(self, session: ClientSession, router: str, announcement: Announcement) -> None:
        began = time.perf_counter()
        await super()._tell(session, router, announcement)
        self.calls_s.append(time.perf_counter() - began)
        if not self._trouble[router]:
            self.is_known.set()


class StandIn:
    """One engine: a port, what it says of itself, and its registration."""

    def __init__(self, role: Side, num_tokens: int, gap_s: float) -> None:
        self.role, self.num_asked, self.port = role, 0, 0
        self.connections: set[StandInConnection] = set()
        self._num_tokens, self._gap_s = num_tokens, gap_s
        self._num_starts, self._version, self._is_leaving = 0, 0, False

    async def listen(self, is_new_version: bool) -> None:
        """As another process than before, on the same port."""
        self._num_starts, self._version = self._num_starts + 1, self._version + is_new_version
        self._is_leaving = False
        make = lambda: StandInConnection(self, self._num_tokens, self._gap_s)  # noqa: E731
        self._server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    def status(self) -> bytes:
        words = b"503 Service Unavailable" if self._is_leaving else b"200 OK"
        return words + b"\r\nx-kvferry-epoch: " + self._epoch().encode()

    def info(self) -> bytes:
        version = str(self._version)
        told = {"engine": "kvferry", "version": version, "wire_version": version, "epoch": self._epoch()}
        return json.dumps({**told, "models": ["fake"], "cache": "cache"}).encode()

    def join(self, router: str) -> TimedRegistrar:
        config = RegistrarConfig((router,), f"http://127.0.0.1:{self.port}", (self.role,), b"", timeout_s=PATIENCE_S)
        self._registrar = TimedRegistrar(config)
        self._registering = asyncio.create_task(self._registrar.run())
        return self._registrar

    async def leave(self, notice_s: float) -> None:
        """Drain as an engine does: say so, give routers time to notice, finish what is open, end."""
        self._is_leaving = True
        self._registrar.leave()
        await self._registering
        await asyncio.sleep(notice_s)
        async with asyncio.timeout(DRAIN_S):
            while any(connection.is_busy for connection in self.connections):
                await asyncio.sleep(POLL_S)
        self._close()

    def die(self) -> None:
        """Without a word."""
        self._registering.cancel()
        self._close()

    def _close(self) -> None:
        self._server.close()
        for connection in self.connections:
            connection.abort()

    def _epoch(self) -> str:
        return f"{self.port}-{self._num_starts}"


class StandInConnection(Connection):
    """Of one engine, which is asked who and how it is as well."""

    def __init__(self, engine: StandIn, num_tokens: int, gap_s: float) -> None:
        super().__init__(num_tokens, gap_s)
        self._engine = engine

    @property
    def is_busy(self) -> bool:
        return self._left > 0

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._engine.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.connections.discard(self)

    def _answer(self, path: bytes, body: bytes) -> None:
        self._engine.num_asked += 1
        if path.startswith(b"/ready"):
            self._transport.write(whole(self._engine.status(), b"{}"))
        elif path.startswith(b"/kvferry/info"):
            self._transport.write(whole(b"200 OK", self._engine.info()))
        else:
            super()._answer(path, body)


class Crowd:
    """All engines of this process."""

    def __init__(self, engines: list[StandIn]) -> None:
        self._engines = engines

    async def obey(self, order: dict[str, Any]) -> Any:
        engines = [self._engines[number] for number in order.get("engines", ())]
        match order["do"]:
            case "join":
                return await join(engines, order["router"])
            case "restart":
                began = time.perf_counter()
                await asyncio.gather(*(engine.leave(order["notice_s"]) for engine in engines))
                left_s = time.perf_counter() - began
                await asyncio.gather(*(engine.listen(is_new_version=True) for engine in engines))
                return {"left_s": left_s, **await join(engines, order["router"])}
            case "die":
                for engine in engines:
                    engine.die()
            case "revive":
                await asyncio.gather(*(engine.listen(is_new_version=False) for engine in engines))
                return await join(engines, order["router"])
        return {"num_asked": sum(engine.num_asked for engine in self._engines)}


async def join(engines: list[StandIn], router: str) -> dict[str, float]:
    """All at once. Returns when the router knows all of them, and what the longest of them had to wait for that."""
    began = time.perf_counter()
    registrars = [engine.join(router) for engine in engines]
    await asyncio.gather(*(registrar.is_known.wait() for registrar in registrars))
    calls_s = [took for registrar in registrars for took in registrar.calls_s]
    known_s = time.perf_counter() - began
    return {"known_s": known_s, "longest_call_s": max(calls_s), "calls": len(calls_s)}


async def main(number: int, num_tokens: int, gap_ms: float) -> None:
    roles = (Side.PREFILL if place < number // 2 else Side.DECODE for place in range(number))
    engines = [StandIn(role, num_tokens, gap_ms / 1000) for role in roles]
    for engine in engines:
        await engine.listen(is_new_version=True)
    # Its own pauses are not the router's.
    gc.freeze()
    print(json.dumps([engine.port for engine in engines]), flush=True)
    lines, crowd = asyncio.StreamReader(), Crowd(engines)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while order := await lines.readline():
        print(json.dumps(await crowd.obey(json.loads(order))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
