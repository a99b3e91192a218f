"""Early legs of real vLLM servers: what is computed leaves while the rest is, and the answer is that of one server."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from answers import alone, judge, prompts_of, wait_until_free
from proxy import Question, RefusedError, ask, ask_disaggregated, decode, open_request
from servers import PLAIN, Pair, PairSpec, Server, ServerSpec

CHUNKED = ServerSpec("kv_producer", flags=("--max-num-batched-tokens", "256"))
PACKED = PairSpec("llama", CHUNKED, lease_s=15, extra=(("strategy", "pack"),))
PUSHED = PairSpec("llama", CHUNKED, lease_s=15, extra=(("strategy", "direct"), ("transfer_direction", "push")))
EARLY = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry": {"early": True}}
MOVED, DONE = "vllm:kvferry_agent_moved_bytes_total", "vllm:request_success_total"
LONG = 4000
FREE_S = 30.0


class Stream:
    """An early leg, read event by event; `params` are those of its first event."""

    def __init__(self, server: Server, question: Question, **changed: Any) -> None:
        body = question.body(1, EARLY) | {"stream": True} | changed
        self._connection = open_request(server, question, body)
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise RefusedError(self._response.status, self._response.read().decode())
        first = next(self)
        assert first["choices"] == []
        self.params: dict[str, Any] = first["kv_transfer_params"]

    def __next__(self) -> Any:
        line = self._response.readline().removeprefix(b"data: ").strip()
        assert self._response.readline() == b"\n"
        return line.decode() if line == b"[DONE]" else json.loads(line)

    def rest(self) -> list[Any]:
        found = []
        while not found or found[-1] != "[DONE]":
            found.append(next(self))
        return found

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        self._response.close()
        self._connection.close()


@pytest.mark.parametrize("spec", [PACKED, PUSHED], ids=["packed", "pushed"])
def test_what_is_computed_leaves_while_the_rest_is(pair, spec):
    ask_disaggregated(pair.prefill, pair.decode, prompts_of((300,), seed=1)[0])
    (question,) = prompts_of((LONG,))
    moved, done = pair.prefill.metric(MOVED), pair.prefill.metric(DONE)
    with Stream(pair.prefill, question) as stream, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, pair.decode, question, stream.params)
        seen = []
        while pair.prefill.metric(DONE) == done:
            seen.append(pair.prefill.metric(MOVED) - moved)
        print(f"\n{spec}: {seen}")
        stream.rest()
        assert not judge(pair.prefill, pair.decode, question, answer.result()).problem
    assert max(seen) > 0
    wait_until_free(pair.servers, FREE_S)
