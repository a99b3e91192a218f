"""A client that plays vLLM's example proxy: prefill on one server, decode on another with what the first returned."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from servers import Server

__all__ = ["Question", "RefusedError", "ask", "ask_disaggregated", "decode", "post_body", "prefill"]

ANSWER_S = 300.0
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class RefusedError(Exception):
    """A server answered with an error status; `status` and the body say which and why."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:2000]}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of token ids. Only questions with the same `salt` share cached prefixes."""

    prompt: tuple[int, ...]
    salt: str
    num_tokens: int = 12
    request_id: str = ""

    def body(self, num_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": list(self.prompt),
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": self.salt,
            **({"kv_transfer_params": params} if params is not None else {}),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server generated: token ids and the log-probability of each; `params` as the server returned them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    params: dict[str, Any] | None


def ask(server: Server, question: Question) -> Answer:
    """The server's own answer, nothing transferred."""
    return _post(server, question, question.body(question.num_tokens, None))


def prefill(server: Server, question: Question) -> Answer:
    """The prefill request: one token; the answer's `params` are for the decode request."""
    return _post(server, question, question.body(1, REMOTE_DECODE))


def decode(server: Server, question: Question, params: dict[str, Any] | None) -> Answer:
    return _post(server, question, question.body(question.num_tokens, params))


def ask_disaggregated(source: Server, target: Server, question: Question) -> Answer:
    """Both requests. Raises RefusedError when a server refuses one, or the prefill request returns nothing to pull."""
    first = prefill(source, question)
    if not first.params:
        raise RefusedError(200, "the prefill request returned no kv_transfer_params")
    return decode(target, question, first.params)


def _post(server: Server, question: Question, body: dict[str, Any]) -> Answer:
    return _answer(post_body(server, question, body))


def post_body(server: Server, question: Question, body: dict[str, Any]) -> Any:
    """The whole answer to a body. Raises RefusedError."""
    connection = open_request(server, question, body)
    try:
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise RefusedError(response.status, text)
    return json.loads(text)


def open_request(server: Server, question: Question, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request without waiting for the answer: closing the connection is how a client goes away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    headers = {"content-type": "application/json"}
    if question.request_id:
        headers["X-Request-Id"] = question.request_id
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def _answer(document: dict[str, Any]) -> Answer:
    choice = document["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    params = document.get("kv_transfer_params")
    return Answer(tuple(choice["token_ids"]), tuple(logprobs), str(choice.get("finish_reason")), params)
