"""A small API server of Kubernetes for pods, over real HTTP: lists, watches from a version, forgets old versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

NAMESPACE = "inference"


def pod(name: str, role: str | None = "prefill", ip: str = "10.0.0.1", port: int = 8000, **metadata) -> dict:
    """As the API writes one, as far as anybody reads it here."""
    labels = {"app": "kvferry"} | ({"kvferry.io/role": role} if role else {})
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels} | metadata,
        "spec": {"containers": [{"name": "engine", "ports": [{"containerPort": port, "name": "http"}]}]},
        "status": {"phase": "Running"} | ({"podIP": ip} if ip else {}),
    }


@dataclass
class ClusterApi:
    """`refusal` answers everything, as a proxy does it if `is_plain`; `is_silent` answers nothing. `asked` are the
    queries that came."""

    pods: dict[str, dict] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    history: list[tuple[int, str | int, dict]] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    is_silent: bool = False
    is_plain: bool = False
    num_starts: int = 0
    token: str = ""
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, one: dict) -> None:
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = one
        self._tell(kind, one)

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.pods.pop(name))

    def bookmark(self) -> None:
        self._tell("BOOKMARK", {"kind": "Pod", "metadata": {}})

    def talk_nonsense(self) -> None:
        self._tell(7, {"metadata": {}})

    def forget(self) -> None:
        """What was before is not kept any more: watches from there are answered with 410."""
        self.version += 1
        self.oldest, self.history = self.version, []
        self._wake()

    def break_watches(self) -> None:
        """Those that are open end, as when the server starts anew."""
        self.num_starts += 1
        self._wake()

    def _tell(self, kind: str | int, one: dict) -> None:
        self.version += 1
        metadata = one["metadata"] | {"resourceVersion": str(self.version)}
        self.history.append((self.version, kind, {**one, "metadata": metadata}))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        self.namespaces.add(request.match_info["namespace"])
        if self.is_silent:
            await asyncio.Event().wait()
        if self.refusal and self.is_plain:
            return web.Response(status=self.refusal[0], text=self.refusal[1])
        if self.refusal:
            status, message = self.refusal
            return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if request.query.get("watch") not in ("true", "True"):
            listed = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.pods.values())}
            return web.json_response(listed)
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        seen, start = int(request.query["resourceVersion"]), self.num_starts
        self.watching.set()
        while True:
            if seen < self.oldest:
                status = {"kind": "Status", "code": 410, "message": f"too old resource version: {seen}"}
                await response.write(line_of("ERROR", status))
                return response
            for version, kind, one in [each for each in self.history if each[0] > seen]:
                seen = version
                await response.write(line_of(kind, one))
            if start != self.num_starts:
                return response
            await self.changed.wait()

    def kubeconfig(self, path: Path) -> str:
        """A file that leads here."""
        named = {"name": "here"}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{**named, "cluster": {"server": self.url}}],
                    "users": [{**named, "user": {"token": self.token} if self.token else {}}],
                    "contexts": [{**named, "context": {"cluster": "here", "user": "here", "namespace": NAMESPACE}}],
                }
            )
        )
        return str(path)


def line_of(kind: str | int, one: dict) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


@contextlib.asynccontextmanager
async def serving_api(**settings) -> AsyncIterator[ClusterApi]:
    api = ClusterApi(**settings)
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
