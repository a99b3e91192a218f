"""What an engine says of itself and of its answers: ready or not, and how the cache came."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from embedded_loopback import Loopback
from embedded_server import Served, serve
from embedded_support import Loop

from kvferry.embedded.http.app import create_app
from kvferry.embedded.serving.service import ServeInfo
from kvferry.errors import TransferError
from kvferry.wire.messages import Reason

COMPLETIONS = "/v1/completions"
PROMPT = list(range(300, 340))


def headers_of(served: Served, body: dict[str, Any]) -> http.client.HTTPMessage:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", COMPLETIONS, json.dumps({"prompt": PROMPT, "max_tokens": 2} | body).encode())
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_the_header_says_how_the_cache_came(prefiller: Served, decoder: Served, stream: bool) -> None:
    assert headers_of(decoder, {"stream": stream})["x-kvferry-cache"] == "local"
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = prefiller.ask(COMPLETIONS, body)[1]["kv_transfer_params"]
    decode = {"stream": stream, "kv_transfer_params": params}
    assert headers_of(decoder, decode)["x-kvferry-cache"] == "received"
    again = headers_of(decoder, decode)
    assert again["x-kvferry-cache"] == "recomputed"
    assert again["x-kvferry-cache-reason"]


def test_a_refusal_says_nothing_of_a_cache(decoder: Served) -> None:
    assert "x-kvferry-cache" not in headers_of(decoder, {"prompt": []})


def test_what_was_offered_can_be_released_once(prefiller: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = prefiller.ask(COMPLETIONS, body)[1]["kv_transfer_params"]
    assert prefiller.ask("/kvferry/release", {"kv_transfer_params": params}) == (200, {"released": True})
    assert prefiller.ask("/kvferry/release", {"kv_transfer_params": params}) == (200, {"released": False})
    assert prefiller.ask("/kvferry/release", {"kv_transfer_params": {"a": 1}})[0] == 400
    status, answer = prefiller.ask("/kvferry/release", {"nothing": 1})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_a_request_that_does_not_fit_forgoes_its_cache(decoder: Served) -> None:
    before = len(decoder.transfer.forgone)
    params = {"do_remote_prefill": True, "remote_request_id": "somewhere"}
    status, _ = decoder.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4790, "kv_transfer_params": params})
    assert status == 400
    assert len(decoder.transfer.forgone) == before + 1


class Broken(Loopback):
    """A transfer whose peers are lost."""

    async def fetch(self, request_id: str, params: object, block_tables: list[list[int]], num_tokens: int) -> Any:
        self.engine.release(request_id)
        raise TransferError(Reason.PEER_LOST, "nobody answers")


def test_an_engine_whose_transfers_fail_is_not_ready_but_healthy(loop: Loop, decoder: Served) -> None:
    working = decoder.transfer
    transfer = Broken(decoder.engine, working.offers, working.gate, working.fence)

    async def start() -> tuple[Any, int, Any]:
        app = create_app(decoder.engine, transfer, ServeInfo("tiny", "e", 1))
        server = serve(app)
        return server, await server.__aenter__(), app.state.service

    server, port, service = loop.run(start())
    served = Served(decoder.engine, transfer, port)
    assert served.ask("/ready") == (200, {"status": "ready", "reason": ""})
    decode = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_prefill": True}}
    for _ in range(5):
        assert served.ask(COMPLETIONS, decode)[1]["kvferry"]["recomputed"] == "peer_lost"
    status, answer = served.ask("/ready")
    assert (status, answer["reason"]) == (503, "the last 5 transfers failed (peer_lost)")
    assert served.ask("/health")[0] == 200
    assert served.metric("kvferry_engine_ready") == 0
    service.drain()
    assert "draining" in served.ask("/ready")[1]["reason"]
    assert served.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1})[0] == 200
    loop.run(server.__aexit__(None, None, None))


def test_an_engine_says_who_it_is(decoder: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", decoder.port, timeout=30)
    connection.request("GET", "/kvferry/info")
    told = json.loads(connection.getresponse().read())
    connection.request("GET", "/ready")
    assert connection.getresponse().headers["x-kvferry-epoch"] == told["epoch"]
    connection.close()
    assert told["engine"] == "kvferry"
    assert {"version", "wire_version", "engine_id", "epoch", "models", "cache"} <= set(told)
    meeting = {name: told[name] for name in ("meets_in_rooms", "bootstrap_host", "bootstrap_port")}
    assert meeting == {"meets_in_rooms": True, "bootstrap_host": "::1", "bootstrap_port": 7007}
