"""Our engines behind vLLM's own example proxy, unchanged: it is not ours to pass on, so it has to be given.

`pytest tests/e2e/test_example_proxy.py --example-proxy toy_proxy_server.py --example-python VLLM/bin/python`
"""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from urllib.parse import urlsplit

import pytest
from conftest import DEADLINE_S, eventually, metric, post
from test_main_job import prompt_of

QUESTION = {"model": "tiny", "prompt": prompt_of(145), "max_tokens": 24}


@pytest.fixture(scope="module")
def script(request):
    """What to run; nothing is started without it."""
    found = request.config.getoption("--example-proxy")
    if not found:
        pytest.skip("no --example-proxy was given")
    return [request.config.getoption("--example-python"), found]


@pytest.fixture(scope="module")
def fleet(script, start_fleet):
    return start_fleet(decode_block_tokens=32)


@pytest.fixture(scope="module")
def proxy(script, fleet, tmp_path_factory):
    """The URL of the example proxy in front of the fleet's engines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*script, "--port", str(port)]
    for role, (url,) in (("prefiller", fleet.prefill_urls), ("decoder", fleet.decode_urls)):
        place = urlsplit(url)
        words += [f"--{role}-hosts", place.hostname, f"--{role}-ports", str(place.port)]
    with open(tmp_path_factory.mktemp("proxy") / "proxy.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        eventually(lambda: listens(port), "the proxy listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def num_received(fleet):
    """Prompt tokens whose cache has come to the decode engine: the proxy passes no header of ours."""
    return metric(fleet.decode_urls[0], "kvferry_engine_tokens_received_total")


def test_a_whole_answer_is_that_of_one_engine(fleet, proxy):
    alone, before = post(fleet.decode_urls[0] + "/v1/completions", QUESTION), num_received(fleet)
    through = post(proxy + "/v1/completions", QUESTION)
    assert through["choices"][0]["text"] == alone["choices"][0]["text"]
    assert num_received(fleet) == before + 144


def test_a_stream_is_that_of_one_engine(fleet, proxy):
    alone, before = post(fleet.decode_urls[0] + "/v1/completions", QUESTION), num_received(fleet)
    body = json.dumps(QUESTION | {"stream": True}).encode()
    request = urllib.request.Request(proxy + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        frames = response.read().decode().strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    told = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    text = "".join(choice["text"] for frame in told for choice in frame["choices"])
    assert text == alone["choices"][0]["text"]
    assert num_received(fleet) == before + 144
