"""Prefill on one server, decode on another, and everything that can go wrong between them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from embedded_loopback import NoTransfer
from embedded_server import Served, serve
from embedded_support import Loop, request

from kvferry.connectors.jobs import Settings
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.http.app import create_app
from kvferry.embedded.serving.openai_objects import CompletionObjects
from kvferry.embedded.serving.service import ServeInfo
from kvferry.errors import ConfigurationError, FerryError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body(num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": list(request("", num_tokens).prompt), "max_tokens": 12, "return_token_ids": True} | more


def prefill(prefiller: Served, ask: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    status, answer = prefiller.ask(path, ask | {"kv_transfer_params": {"do_remote_decode": True}})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 1
    params = answer["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 700])
def test_two_engines_give_the_answer_of_one(prefiller: Served, decoder: Served, num_tokens: int) -> None:
    ask = body(num_tokens)
    _, plain = decoder.ask(COMPLETIONS, ask)
    params = prefill(prefiller, ask)
    status, answer = decoder.ask(COMPLETIONS, ask | {"kv_transfer_params": params})
    assert status == 200
    assert answer["choices"] == plain["choices"]
    assert answer["usage"] == plain["usage"]
    report = answer["kvferry"]
    assert report["tokens_computed"] == 1
    assert report["tokens_received"] == num_tokens - 1
    assert report["bytes"] == (num_tokens - 1) * 8192
    assert report["transport"] == "loopback"
    assert report["recomputed"] == ""


def test_two_engines_answer_a_streamed_chat(prefiller: Served, decoder: Served) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Who rings the bell?"}], "max_tokens": 9}
    _, plain = decoder.ask(CHAT, ask)
    params = prefill(prefiller, ask, CHAT)
    events = decoder.events(CHAT, ask | {"kv_transfer_params": params})
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == plain["choices"][0]["message"]["content"]
    assert events[-1]["kvferry"]["tokens_computed"] == 1


NONSENSE: list[dict[str, Any]] = [
    {},
    {"remote_request_id": 7},
    {"remote_request_id": ["x"] * 1000, "remote_block_ids": [[-1]], "remote_port": "http"},
    {"remote_request_id": "forged-1"},
    {"remote_engine_id": None, "remote_host": {"a": [None]}},
]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_params_that_nobody_made_are_computed_here(decoder: Served, nonsense: dict[str, Any]) -> None:
    ask = body(40)
    _, plain = decoder.ask(COMPLETIONS, ask)
    failures = decoder.metric('kvferry_engine_transfer_failures_total{reason="unknown_lease"}')
    status, answer = decoder.ask(COMPLETIONS, ask | {"kv_transfer_params": nonsense | {"do_remote_prefill": True}})
    assert status == 200
    assert answer["choices"] == plain["choices"]
    assert answer["kvferry"]["recomputed"] == "unknown_lease"
    assert answer["kvferry"]["tokens_computed"] == 40
    assert set(answer["kvferry"]["phases_s"]) == {"lost"}
    assert decoder.metric('kvferry_engine_transfer_failures_total{reason="unknown_lease"}') == failures + 1
    assert decoder.metric('kvferry_engine_failed_transfer_seconds_count{reason="unknown_lease"}') == failures + 1
    assert decoder.metric('kvferry_engine_failed_transfer_seconds_sum{reason="unknown_lease"}') > 0


def test_the_first_wrong_byte_can_be_told_from_none(decoder: Served) -> None:
    """An alarm looks at what the counter grows by."""
    _, text = decoder.raw("/metrics")
    assert 'kvferry_engine_transfer_failures_total{reason="digest"} 0.0' in text


def test_ids_that_are_no_tokens_are_refused_and_the_source_is_told(decoder: Served) -> None:
    before = len(decoder.transfer.forgone)
    status, answer = decoder.ask(COMPLETIONS, {"prompt": [-1, 5, 6], "kv_transfer_params": {"do_remote_prefill": True}})
    assert (status, "vocabulary" in answer["error"]["message"]) == (400, True)
    assert len(decoder.transfer.forgone) == before + 1


def test_blocks_of_a_failed_fetch_stay_in_quarantine(loop: Loop, decoder: Served) -> None:
    """The request is answered from fresh blocks while the first ones still belong to the transfer."""
    fence = decoder.transfer.fence
    loop.loop.call_soon_threadsafe(fence.clear)
    _, answer = decoder.ask(COMPLETIONS, body(40, kv_transfer_params={"do_remote_prefill": True}))
    assert answer["kvferry"]["recomputed"] == "unknown_lease"
    ledger = decoder.engine.block_usage()
    assert (ledger.num_leased, ledger.allocated) == (1, (2,))
    loop.loop.call_soon_threadsafe(fence.set)


def test_the_policy_may_be_to_fail(loop: Loop, decoder: Served) -> None:
    async def start() -> tuple[Any, int]:
        info = ServeInfo(model="tiny", engine_id="e", created=1, policy="fail")
        server = serve(create_app(decoder.engine, decoder.transfer, info))
        return server, await server.__aenter__()

    server, port = loop.run(start())
    strict = Served(decoder.engine, decoder.transfer, port)
    status, answer = strict.ask(COMPLETIONS, body(40, kv_transfer_params={"do_remote_prefill": True}))
    assert (status, answer["error"]["code"]) == (502, "unknown_lease")
    status, answer = strict.ask(COMPLETIONS, body(40, stream=True, kv_transfer_params={"do_remote_prefill": True}))
    assert (status, answer["error"]["code"]) == (502, "unknown_lease")
    loop.run(server.__aexit__(None, None, None))
    with pytest.raises(ConfigurationError):
        ServeInfo(model="tiny", engine_id="e", created=1, policy="hope")


def test_an_engine_on_its_own_says_so(loop: Loop, decoder: Served) -> None:
    async def start() -> tuple[Any, int]:
        server = serve(create_app(decoder.engine, NoTransfer(), ServeInfo("tiny", "e", 1)))
        return server, await server.__aenter__()

    server, port = loop.run(start())
    alone = Served(decoder.engine, decoder.transfer, port)
    status, answer = alone.ask(COMPLETIONS, body(40, kv_transfer_params={"do_remote_decode": True}))
    assert (status, answer["error"]["code"]) == (502, "no_transfer")
    loop.run(server.__aexit__(None, None, None))


def test_a_client_that_leaves_during_the_fetch(loop: Loop, decoder: Served) -> None:
    transfer = decoder.transfer
    ask = '{"prompt": [5, 6, 7], "kv_transfer_params": {"do_remote_prefill": true}}'
    before = len(transfer.aborted)

    async def close_gate() -> None:
        transfer.gate.clear()
        transfer.entered.clear()

    loop.run(close_gate())
    with socket.create_connection(("127.0.0.1", decoder.port)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(ask)}\r\n\r\n{ask}"
        connection.sendall(head.encode())
        loop.run(transfer.entered.wait())
    loop.run(decoder.engine.idle())
    assert len(transfer.aborted) == before + 1
    loop.loop.call_soon_threadsafe(transfer.gate.set)


@pytest.mark.parametrize("ours", [{}, {"kvferry": {"room": 7}}])
def test_a_prefill_that_fails_when_its_prompt_is_computed_keeps_no_cache(
    loop: Loop, prefiller: Served, monkeypatch: pytest.MonkeyPatch, ours: dict[str, Any]
) -> None:
    """Nobody has its reference, so nobody but itself can let go of it."""

    def fail(*_: object) -> None:
        raise ValueError("a defect")

    before = len(prefiller.transfer.aborted)
    monkeypatch.setattr(CompletionObjects, "whole", fail)
    status, _ = prefiller.ask(COMPLETIONS, body(40, kv_transfer_params={"do_remote_decode": True, **ours}))
    assert status == 500
    (request_id,) = prefiller.transfer.aborted[before:]

    async def end() -> bool:
        return prefiller.transfer.withdraw({"remote_request_id": prefiller.transfer.offers.name_of(request_id)})

    # It was computed and offered; what ends the offer of a real transfer is only noted by this one.
    assert loop.run(end())


def test_one_id_for_two_requests_at_the_same_time(loop: Loop, decoder: Served) -> None:
    transfer, headers = decoder.transfer, {"x-request-id": "twin"}

    async def close_gate() -> None:
        transfer.gate.clear()
        transfer.entered.clear()

    async def twins() -> list[int]:
        ask = body(20, kv_transfer_params={"do_remote_prefill": True})
        first = asyncio.create_task(asyncio.to_thread(decoder.ask, COMPLETIONS, ask, headers))
        await transfer.entered.wait()
        second, _ = await asyncio.to_thread(decoder.ask, COMPLETIONS, body(20), headers)
        transfer.gate.set()
        return [second, (await first)[0]]

    loop.run(close_gate())
    assert loop.run(twins()) == [200, 200]


def test_many_at_once_are_all_right(loop: Loop, prefiller: Served, decoder: Served) -> None:
    plain = [decoder.ask(COMPLETIONS, body(20 + 9 * i))[1]["choices"] for i in range(6)]

    def ferry(i: int) -> Any:
        ask = body(20 + 9 * i)
        return decoder.ask(COMPLETIONS, ask | {"kv_transfer_params": prefill(prefiller, ask)})[1]

    async def crowd() -> list[Any]:
        return list(await asyncio.gather(*(asyncio.to_thread(ferry, i) for i in range(6))))

    answers = loop.run(crowd())
    assert [answer["choices"] for answer in answers] == plain
    assert {answer["kvferry"]["tokens_computed"] for answer in answers} == {1}


def test_health_turns_503_when_the_engine_dies(loop: Loop, model_path: Path) -> None:
    engine = Engine(Settings(str(model_path), num_blocks=32))

    def stumble(scheduler: object) -> None:
        raise ArithmeticError("out of coal")

    async def start() -> tuple[Any, int]:
        await engine.start()
        server = serve(create_app(engine, NoTransfer(), ServeInfo("tiny", "e", 1)))
        return server, await server.__aenter__()

    async def die() -> None:
        await engine.prefill(request("held", 5, 1))  # nobody ends it: `idle` then waits for the end of the thread
        tokens = engine.generate(request("last", 5, 300))
        await anext(tokens)
        engine._core._command(stumble)
        with pytest.raises(FerryError, match="out of coal"):
            async for _ in tokens:
                pass

    server, port = loop.run(start())
    served = Served(engine, None, port)  # type: ignore[arg-type]
    assert served.ask("/health")[0] == 200
    loop.run(die())
    loop.run(engine.idle())
    status, answer = served.ask("/health")
    assert (status, answer["status"]) == (503, "failed")
    assert served.ask(COMPLETIONS, {"prompt": "a"})[0] == 503
    loop.run(server.__aexit__(None, None, None))
    loop.run(engine.close())
