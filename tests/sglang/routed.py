"""kvferry's router in front of a pair of SGLang servers, and what its clients see."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asking import ANSWER_S, NUM_NEW_TOKENS, Prompt
from engine_server import EngineServer
from sglang_servers import Pair

IDLE_S = 30.0
POLL_S = 0.1


class Router(EngineServer):
    """`kvferry route` for one pair."""

    def __init__(self, pair: Pair, log: Path) -> None:
        super().__init__("router", log, "/ready")
        self._urls = pair.prefill.url, pair.decode.url

    def environment(self) -> dict[str, str]:
        return {}

    def command(self) -> list[str]:
        prefill, decode = self._urls
        servers = ("--prefill", prefill, "--decode", decode)
        return [sys.executable, "-m", "kvferry", "route", "--port", str(self.port), *servers, "--access-log"]

    def until_idle(self) -> None:
        """Neither the router nor a server is busy with a request. Raises TimeoutError while one is."""
        deadline = time.monotonic() + IDLE_S
        while any(one["in_flight_requests"] for one in told(f"{self.url}/kvferry/members")["members"]):
            _wait(deadline)
        for url in self._urls:
            while any(rank["num_running_reqs"] for rank in told(f"{url}/v1/loads")["loads"]):
                _wait(deadline)


def told(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
        return json.load(response)


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("a request still goes on")
    time.sleep(POLL_S)


@contextmanager
def routing(pair: Pair, log: Path) -> Iterator[Router]:
    router = Router(pair, log)
    try:
        router.start()
        router.wait_until_ready()
        yield router
    finally:
        router.stop()


def completion(prompt: Prompt, **more: Any) -> dict[str, Any]:
    common = {"model": "tiny", "max_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt, "return_token_ids": True, **more}


def post(router: Router, body: dict[str, Any], path: str = "/v1/completions", within_s: float = ANSWER_S) -> Any:
    """Status, headers and decoded body. Raises TimeoutError when the client has left before."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=within_s)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def stream(router: Router, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The events of a stream that ends in order."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        response = connection.getresponse()
        lines = [line.strip() for line in response]
    finally:
        connection.close()
    assert (response.status, response.headers["x-kvferry-path"]) == (200, "disaggregated"), lines
    assert lines[-2:] == [b"data: [DONE]", b""]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


def tokens_of(body: dict[str, Any]) -> list[int]:
    """The tokens of a completion, or of one event of it."""
    return [token for choice in body["choices"] for token in choice.get("token_ids") or ()]
