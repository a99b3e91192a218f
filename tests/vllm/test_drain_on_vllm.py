"""A real vLLM server that is told to end: it finishes what it has, says that it is not ready, and takes no more."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import pytest
from answers import prompts_of
from proxy import open_request
from servers import PairSpec, Server, ServerSpec

NUM_TOKENS = 600
DEADLINE_S = 120.0
SPEC = ServerSpec("kv_both", flags=("--shutdown-timeout", "120"))


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    server = Server(PairSpec("llama", SPEC, SPEC), SPEC, "FerryConnector", tmp_path / "vllm.log")
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def ask(server: Server, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


def test_a_server_that_ends_finishes_what_it_has_and_says_that_it_is_not_ready(server):
    assert ask(server, "GET", "/ready")[0] == 200
    (question,) = prompts_of((40,))
    body = question.body(NUM_TOKENS, None) | {"stream": True, "ignore_eos": True}
    stream = open_request(server, question, body)
    response = stream.getresponse()
    first = response.read1()
    server.terminate()
    deadline = time.monotonic() + DEADLINE_S
    while (told := ask(server, "GET", "/ready"))[0] == 200:
        assert time.monotonic() < deadline
    assert (told[0], told[1]["reason"]) == (503, "it is draining")
    status, refused = ask(server, "POST", "/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 1})
    assert (status, refused["error"]["code"]) == (503, "draining")
    frames = (first + response.read()).decode().strip().split("\n\n")
    stream.close()
    assert frames[-1] == "data: [DONE]"
    choices = [choice for frame in frames[:-1] for choice in json.loads(frame.removeprefix("data: "))["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    assert server.process.wait(DEADLINE_S) == 0
