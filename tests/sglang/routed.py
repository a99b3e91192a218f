"""kvferry's router in front of a prefill and a decode server, SGLang's or another's, and what its clients see."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from asking import ANSWER_S, NUM_NEW_TOKENS, Prompt
from engine_server import EngineServer
from other_engines import Other
from sglang_servers import SGLangServer

IDLE_S = 30.0
POLL_S = 0.1
JSON = {"content-type": "application/json"}
Server = SGLangServer | Other
# Metrics of an engine that are zero while it has nothing to do.
BUSY = {
    "transformers": ('kvferry_engine_blocks{state="granted"}', "kvferry_agent_open_reads"),
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
}


class Router(EngineServer):
    """`kvferry route` for one pair."""

    def __init__(self, prefill: Server, decode: Server, log: Path) -> None:
        super().__init__("router", log, "/ready")
        self._servers = prefill, decode

    def environment(self) -> dict[str, str]:
        return {}

    def command(self) -> list[str]:
        prefill, decode = self._servers
        servers = ("--prefill", prefill.url, "--decode", decode.url)
        return [sys.executable, "-m", "kvferry", "route", "--port", str(self.port), *servers, "--access-log"]

    def until_idle(self) -> None:
        """Neither the router nor a server is busy with a request. Raises TimeoutError while one is."""
        deadline = time.monotonic() + IDLE_S
        while any(one["in_flight_requests"] for one in told(f"{self.url}/kvferry/members")["members"]):
            _wait(deadline)
        for server in self._servers:
            until_free(server)


def until_free(server: Server) -> None:
    """It works on no request, and keeps no memory of one but what it caches. Raises TimeoutError while it does."""
    deadline = time.monotonic() + IDLE_S
    while _is_busy(server):
        _wait(deadline)


def _is_busy(server: Server) -> bool:
    if isinstance(server, SGLangServer):
        loads = told(f"{server.url}/v1/loads")["loads"]
        return any(rank[name] for rank in loads for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"))
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=ANSWER_S) as response:
        lines = response.read().decode().splitlines()
    return any(float(line.split()[-1]) for line in lines if line.startswith(BUSY[server.spec.engine]))


def told(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
        return json.load(response)


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("a request still goes on")
    time.sleep(POLL_S)


def routing(prefill: Server, decode: Server, log: Path) -> AbstractContextManager[Router]:
    return Router(prefill, decode, log).running()


def completion(prompt: Prompt, **more: Any) -> dict[str, Any]:
    common = {"model": "tiny", "max_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt, "return_token_ids": True, **more}


def post(
    router: EngineServer,
    body: dict[str, Any],
    path: str = "/v1/completions",
    within_s: float = ANSWER_S,
    headers: Mapping[str, str] = JSON,
) -> Any:
    """Status, headers and decoded body. Raises TimeoutError when the client has left before."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=within_s)
    try:
        connection.request("POST", path, json.dumps(body), {**JSON, **headers})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def stream(
    router: EngineServer,
    body: dict[str, Any],
    path: str = "/v1/completions",
    headers: Mapping[str, str] = JSON,
    ends: bytes = b"[DONE]",
) -> list[dict[str, Any]]:
    """The events of a stream that ends in order, of a request that two servers have served."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {**JSON, **headers})
        response = connection.getresponse()
        lines = [line.strip() for line in response]
    finally:
        connection.close()
    assert response.status == 200, lines
    # Only our own router says so.
    assert response.headers["x-kvferry-path"] == ("disaggregated" if isinstance(router, Router) else None)
    assert ends in b"".join(lines[-3:])
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


def tokens_of(body: dict[str, Any]) -> list[int]:
    """The tokens of a completion, or of one event of it."""
    return [token for choice in body["choices"] for token in choice.get("token_ids") or ()]
