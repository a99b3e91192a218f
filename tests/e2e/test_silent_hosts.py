"""A host that is cut off amid a request: the client is answered from elsewhere, or told, long before any time-out.

The limits of the router are minutes and more; a test that waited for them would fail by its own.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from conftest import READY_S, eventually
from hosts import WHY_NOT, Host, Network

from kvferry.cli.child_processes import Child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    # Of each test; the router's own limits are 300 s for a prefill and 1800 s for a decode request.
    pytest.mark.timeout(600),
]

ANSWER_S = 240.0
PORT = 8100
# A prompt takes some ten seconds, and so does an answer: long enough to pull a plug in the midst of either.
SLOW = "token=20ms,step=50ms"
LONG_PROMPT = {"model": "tiny", "prompt": "a word " * 250, "max_tokens": 4}
LONG_ANSWER = {"model": "tiny", "prompt": "a word", "max_tokens": 200, "ignore_eos": True}


class Fleet:
    """A router on the first host, and an engine on each of the others. Clients are on the router's host."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.router = network.hosts["router"]

    def connect(self) -> http.client.HTTPConnection:
        """Made on the router's host; whoever has it may use it anywhere."""
        connection = http.client.HTTPConnection(self.router.address, PORT, timeout=ANSWER_S)
        self.router.do(connection.connect)
        return connection

    def get(self, path: str) -> bytes:
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            return connection.getresponse().read()

    def complete(self, body: dict) -> tuple[int, str, bytes]:
        """Status, path and body of a whole answer."""
        with closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            return response.status, response.headers["x-kvferry-path"], response.read()

    def members(self) -> list[dict]:
        return json.loads(self.get("/kvferry/members"))["members"]

    def busy(self, role: str) -> str:
        """The host that a request is in flight on; empty while there is none."""
        urls = [one["url"] for one in self.members() if one["role"] == role and one["in_flight_requests"]]
        hosts = self.network.hosts.items()
        return next((name for name, host in hosts if f"http://{host.address}:{PORT}" in urls), "")

    def until_busy(self, role: str) -> str:
        eventually(lambda: bool(self.busy(role)), f"a {role} request is in flight")
        return self.busy(role)

    def num_ended(self, role: str) -> float:
        """Requests that were ended since their instance was found down."""
        line = f'kvferry_router_upstream_errors_total{{reason="instance_down",role="{role}"}} '
        told = [one for one in self.get("/metrics").decode().splitlines() if one.startswith(line)]
        return float(told[0].split()[-1]) if told else 0.0


def start(host: Host, log, *arguments: str) -> Child:
    child = host.do(lambda: Child(host.name, arguments, log))
    child.wait_until_ready(time.monotonic() + READY_S)
    return child


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, tiny_model):
    logs = tmp_path_factory.mktemp("hosts")
    token = logs / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    network = Network("router", "prefill", "decode0", "decode1")
    children = []
    try:
        engines = []
        for name in ("prefill", "decode0", "decode1"):
            host = network.hosts[name]
            where = ("--host", host.address, "--port", str(PORT), "--transfer-host", host.address)
            what = ("--engine-id", name, "--model", str(tiny_model), "--served-name", "tiny", "--transport", "tcp")
            how = ("--token-file", str(token), "--simulated-step", SLOW)
            children.append(start(host, logs / name, "serve", *where, *what, *how))
            engines += [f"--{name.rstrip('01')}", f"http://{host.address}:{PORT}"]
        router = network.hosts["router"]
        children.append(
            start(router, logs / "router", "route", "--host", router.address, "--port", str(PORT), *engines)
        )
        yield Fleet(network)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.stop()
        network.close()


@pytest.fixture
def plugged(fleet):
    """All three engines are ready before a test, and every plug is in after it."""
    eventually(lambda: sum(member["ready"] for member in fleet.members()) == 3, "all engines are ready")
    yield fleet
    for name in ("prefill", "decode0", "decode1"):
        fleet.network.plug_in(name)


def test_a_client_whose_prefill_request_waits_is_served_by_decode_alone(plugged):
    with ThreadPoolExecutor(1) as client:
        asking = client.submit(plugged.complete, LONG_PROMPT)
        plugged.network.unplug(plugged.until_busy("prefill"))
        status, path, _ = asking.result(ANSWER_S)
    assert (status, path) == (200, "decode-only")
    assert plugged.num_ended("prefill") == 1


def test_a_client_whose_decode_request_waits_is_served_by_the_other_decode(plugged):
    before = plugged.num_ended("decode")
    with ThreadPoolExecutor(1) as client:
        asking = client.submit(plugged.complete, LONG_ANSWER)
        eventually(lambda: bool(plugged.busy("decode")) and not plugged.busy("prefill"), "only decode is busy")
        plugged.network.unplug(plugged.busy("decode"))
        status, path, body = asking.result(ANSWER_S)
    assert (status, path) == (200, "disaggregated")
    assert json.loads(body)["usage"]["completion_tokens"] == LONG_ANSWER["max_tokens"]
    assert plugged.num_ended("decode") == before + 1


def test_a_client_amid_a_stream_is_told(plugged):
    before = plugged.num_ended("decode")
    with closing(plugged.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(LONG_ANSWER | {"stream": True}))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        plugged.network.unplug(plugged.busy("decode"))
        rest = response.read()
    last = json.loads(rest.strip().rpartition(b"data: ")[2])
    assert (last["error"]["code"], last["error"]["reason"]) == ("upstream_broke_off", "instance_down")
    assert b"[DONE]" not in rest
    assert plugged.num_ended("decode") == before + 1
