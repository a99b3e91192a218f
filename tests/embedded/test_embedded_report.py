"""What an answer tells of its cache: headers always, the object `kvferry` to whoever asks, addresses to nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest
from embedded_loopback import Loopback
from embedded_server import Served, serve
from embedded_support import Loop

from kvferry.agent.transports.negotiation import PeerReport
from kvferry.embedded.http.app import create_app
from kvferry.embedded.serving.service import ServeInfo
from kvferry.errors import TransferError
from kvferry.http.openai import LOST_CACHE, error_of
from kvferry.plan.programs.copies import Direction
from kvferry.session.keys import PeerKey
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.selection.measurement import Measurement
from kvferry.wire.messages import Reason

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETION = {"id", "object", "created", "model", "choices", "usage"}
CHUNK = COMPLETION - {"usage"}
ASKS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": list(range(300, 340)), "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "Who rings?"}], "max_tokens": 3},
}
OBJECT = {
    *("tokens_computed", "tokens_received", "bytes", "descriptors"),
    *("transport", "strategy", "phases_s", "verified", "recomputed"),
}
ADDRESS = "tcp://10.0.0.7:7001"


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("headers", [{}, {"x-kvferry-report": "false"}], ids=["silent", "no"])
def test_an_answer_is_plain_openai(decoder: Served, path: str, headers: dict[str, str]) -> None:
    _, whole = decoder.raw(path, ASKS[path], headers)
    assert set(json.loads(whole)) <= COMPLETION | {"system_fingerprint", "service_tier"}
    _, streamed = decoder.raw(path, ASKS[path] | {"stream": True}, headers)
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.split("\n\n")[:-2]]
    assert events
    for event in events:
        assert set(event) <= CHUNK | {"usage", "system_fingerprint", "service_tier"}


@pytest.mark.parametrize("word", ["true", "True", " true "])
def test_the_report_comes_when_it_is_asked_for(prefiller: Served, decoder: Served, word: str) -> None:
    ask = ASKS[COMPLETIONS]
    _, first = prefiller.ask(COMPLETIONS, ask | {"kv_transfer_params": {"do_remote_decode": True}})
    decode = ask | {"kv_transfer_params": first["kv_transfer_params"]}
    _, answer = decoder.raw(COMPLETIONS, decode, {"x-kvferry-report": word})
    report = json.loads(answer)["kvferry"]
    assert set(report) == OBJECT
    assert (report["tokens_received"], report["transport"]) == (39, "loopback")


@pytest.mark.parametrize("word", ["yes", "1", "", "true, true"])
def test_another_word_is_refused(decoder: Served, word: str) -> None:
    status, answer = decoder.ask(COMPLETIONS, ASKS[COMPLETIONS], {"x-kvferry-report": word})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert "x-kvferry-report" in answer["error"]["message"]
    assert "expected: true or false" in answer["error"]["message"]


class Broken(Loopback):
    """A transfer whose failures name who did not answer."""

    async def fetch(self, request_id: str, params: object, block_tables: list[list[int]], prompt: Any) -> Any:
        self.engine.release(request_id)
        raise TransferError(Reason.PEER_LOST, f"p0@{ADDRESS} has not answered", found=ADDRESS)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_for_want_of_a_cache_names_no_address(loop: Loop, decoder: Served, stream: bool) -> None:
    working = decoder.transfer
    transfer = Broken(decoder.engine, working.offers, working.gate, working.fence)

    async def start() -> tuple[Any, int]:
        server = serve(create_app(decoder.engine, transfer, ServeInfo("tiny", "e", 1, policy="fail")))
        return server, await server.__aenter__()

    server, port = loop.run(start())
    decode = ASKS[COMPLETIONS] | {"stream": stream, "kv_transfer_params": {"do_remote_prefill": True}}
    response = Served(decoder.engine, transfer, port).response(COMPLETIONS, decode)
    text = response.text
    assert response.status == 502
    assert (response.headers["x-kvferry-cache"], response.headers["x-kvferry-cache-reason"]) == ("lost", "peer_lost")
    assert ADDRESS not in text + str(response.headers)
    assert json.loads(text)["error"]["code"] == "peer_lost"
    loop.run(server.__aexit__(None, None, None))


def test_every_reason_has_words_for_clients() -> None:
    assert set(LOST_CACHE) == set(Reason)
    for reason in (*Reason, "no_transfer"):
        status, body = error_of(TransferError(reason, ADDRESS, found=ADDRESS, expected=ADDRESS, hint=ADDRESS))
        assert (status, body["error"]["code"]) == (502, reason)
        assert ADDRESS not in body["error"]["message"]


def test_operators_are_told_how_each_peer_is_reached(decoder: Served) -> None:
    finding = Finding(Severity.WARNING, "slow", "tcp", "shm", "look")
    measured = Measurement("tcp", 2.0, 0.5, 1e-4, "")
    met = PeerReport(
        PeerKey(ADDRESS, "p0", "1"), Place.OTHER_HOST, Direction.READ, "tcp", (measured,), (finding,), "tcp 2.0 GB/s"
    )
    decoder.transfer.peers = (met,)
    (told,) = decoder.ask("/kvferry/info")[1]["peers"]
    decoder.transfer.peers = ()
    assert (told["peer"], told["transport"], told["choice"]) == (f"p0 at {ADDRESS}", "tcp", "tcp 2.0 GB/s")
    assert told["measured"] == [
        {
            "transport": "tcp",
            "carriers": [],
            "error": "",
            "read": {
                "bytes_per_second": 2e9,
                "bytes_per_second_in_rows_of_4_kib": 0.5e9,
                "latency_seconds": 1e-4,
                "error": "",
            },
            "write": {
                "bytes_per_second": 0.0,
                "bytes_per_second_in_rows_of_4_kib": 0.0,
                "latency_seconds": 0.0,
                "error": "not measured",
            },
        }
    ]
    assert told["warnings"] == ["slow; found: tcp; expected: shm; hint: look"]
