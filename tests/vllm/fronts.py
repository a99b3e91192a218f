"""What stands in front of two vLLM servers and is not ours, and what its clients ask: a stand-in for llm-d's routing
sidecar, which says which files and commit it follows, and vLLM's own router.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from answers import alone
from engine_server import EngineServer, hold_ports
from llm_d.running import RunningSidecar
from proxy import ANSWER_S, Question, ask
from servers import Pair

__all__ = ["CHAT", "COMPLETIONS", "FREE_S", "FRONTS", "Front", "OwnRouter", "answer_of", "body_of", "check_right"]
__all__ += ["opened", "sent", "tokens_of"]

FREE_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class OwnRouter(EngineServer):
    """`vllm-router` for one pair, on loopback alone."""

    PROGRAM = Path(sys.executable).with_name("vllm-router")

    def __init__(self, pair: Pair, log: Path) -> None:
        super().__init__("vLLM's router", log)
        self._servers = pair.servers
        self._metrics_port = hold_ports(self.held)
        self.headers: Mapping[str, str] = {}

    def environment(self) -> dict[str, str]:
        return {}

    def command(self) -> list[str]:
        prefill, decode = self._servers
        return [
            *(str(self.PROGRAM), "--vllm-pd-disaggregation", "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(self._metrics_port)),
            *("--prefill", prefill.url, "--decode", decode.url),
        ]


Front = RunningSidecar | OwnRouter
FRONTS = {
    "llm-d": lambda pair, log: RunningSidecar(pair, log, "nixlv2"),
    "vllm-router": OwnRouter,
}


def opened(
    front: Front, body: dict[str, Any], path: str = COMPLETIONS, headers: Mapping[str, str] | None = None
) -> http.client.HTTPConnection:
    """A request that nobody has read the answer of; with the prefill server's name unless there are other headers."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=ANSWER_S)
    more = front.headers if headers is None else headers
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **more})
    return connection


def sent(front: Front, *request: Any) -> tuple[int, Mapping[str, str], bytes]:
    with closing(opened(front, *request)) as connection:
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def body_of(question: Question, **more: Any) -> dict[str, Any]:
    """What a client asks: it knows nothing of another server."""
    return {**question.body(question.num_tokens, None), **more}


def answer_of(front: Front, question: Question, **more: Any) -> dict[str, Any]:
    status, headers, text = sent(front, body_of(question, **more))
    assert status == 200, text
    # Of its own accord either front gives each request an id, by which our middleware knows it.
    assert headers["x-kvferry-cache"] == "received"
    answer: dict[str, Any] = json.loads(text)
    return answer


def tokens_of(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(token for choice in answer["choices"] for token in choice.get("token_ids") or ())


def check_right(front: Front, pair: Pair, question: Question) -> None:
    assert tokens_of(answer_of(front, question)) == ask(pair.decode, alone(question)).tokens
