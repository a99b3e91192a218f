"""A prefill request that gives its reference before its prompt is computed, and says how far it is."""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from embedded_server import REPORT, Served
from embedded_support import DEADLINE_S, Loop, request

from kvferry.connectors.jobs import Event, Produced, Progressed, Settings
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.engine.records import Grown
from kvferry.errors import RequestError
from kvferry.session.events import Ahead

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EARLY = {"do_remote_decode": True, "kvferry": {"early": True}}
NUM_TOKENS = 700  # three steps of the source


def ask_for(num_tokens: int = NUM_TOKENS, **more: Any) -> dict[str, Any]:
    return {"prompt": list(request("", num_tokens).prompt), "max_tokens": 12, "return_token_ids": True} | more


def early(**more: Any) -> dict[str, Any]:
    return ask_for(kv_transfer_params=EARLY, stream=True, **more)


def bytes_of(engine: Engine, blocks: list[int]) -> bytes:
    """The contents of whole blocks of an engine with one cache group."""
    size_bytes, memory = engine.layout().placements[0].block_stride, engine.memory()
    return b"".join(ctypes.string_at(memory.address + block * size_bytes, size_bytes) for block in blocks)


@contextmanager
def between_steps(engine: Engine) -> Iterator[None]:
    """The engine's thread waits before its next step."""
    gate = threading.Event()
    engine._core._command(lambda scheduler: gate.wait(DEADLINE_S) and None)
    try:
        yield
    finally:
        gate.set()


class Stream:
    """A stream that is read event by event."""

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        self._connection = HTTPConnection("127.0.0.1", served.port, timeout=DEADLINE_S)
        self._connection.request("POST", COMPLETIONS, json.dumps(body).encode(), REPORT)
        self._response = self._connection.getresponse()

    def __next__(self) -> Any:
        line = self._response.readline().removeprefix(b"data: ").strip()
        assert self._response.readline() == b"\n"
        return line.decode() if line == b"[DONE]" else json.loads(line)

    def at_end(self) -> bool:
        return self._response.read() == b""

    def leave(self) -> None:
        self._response.close()
        self._connection.close()


def id_of(event: dict[str, Any]) -> str:
    return str(event["kv_transfer_params"]["remote_request_id"])


def test_what_is_told_is_computed_and_stays(loop: Loop, source: Engine) -> None:
    told: list[tuple[int, bytes]] = []

    def tell(grown: Grown) -> None:
        told.append((grown.num_tokens, bytes_of(source, grown.block_tables[0][: grown.num_tokens // 16])))

    async def compute() -> bytes:
        await source.begin(request("early", NUM_TOKENS, 1))
        prefilled = await source.finish("early", tell)
        plain = await source.prefill(request("plain", NUM_TOKENS, 1))
        assert (prefilled.first, prefilled.num_tokens) == (plain.first, NUM_TOKENS)
        whole = bytes_of(source, prefilled.block_tables[0][: NUM_TOKENS // 16])
        assert whole == bytes_of(source, plain.block_tables[0][: NUM_TOKENS // 16])
        for name in ("early", "plain"):
            source.release(name)
        return whole

    whole = loop.run(compute())
    assert [num_tokens for num_tokens, _ in told] == [256, 512]
    for _, part in told:
        assert part == whole[: len(part)]
        assert any(part)


def test_what_has_not_begun_cannot_be_finished(loop: Loop, source: Engine) -> None:
    with pytest.raises(RequestError, match="nothing is reserved"):
        loop.run(source.finish("nobody", lambda grown: None))


def test_the_reference_comes_first_and_the_answer_is_that_of_one_engine(prefiller: Served, decoder: Served) -> None:
    _, plain = decoder.ask(COMPLETIONS, ask_for())
    with between_steps(prefiller.engine):
        stream = Stream(prefiller, early())
        first = next(stream)
        assert first["choices"] == []
        assert prefiller.transfer.offers.promised[id_of(first)].told == []
    params = first["kv_transfer_params"]
    status, answer = decoder.ask(COMPLETIONS, ask_for(kv_transfer_params=params))
    assert (status, answer["choices"]) == (200, plain["choices"])
    assert (answer["kvferry"]["tokens_received"], answer["kvferry"]["recomputed"]) == (NUM_TOKENS - 1, "")
    last = next(stream)
    assert last["kv_transfer_params"] == params
    assert last["kvferry"]["tokens_computed"] == NUM_TOKENS
    assert last["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"][:1]
    assert (next(stream), stream.at_end()) == ("[DONE]", True)
    stream.leave()
    assert prefiller.transfer.offers.promised[id_of(first)].told == [256, 512, NUM_TOKENS]


def test_a_chat_has_it_before_its_opening(prefiller: Served, decoder: Served) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Who rings the bell?"}], "max_tokens": 9}
    reference, opening, *_ = prefiller.events(CHAT, ask | {"kv_transfer_params": EARLY})
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    _, plain = decoder.ask(CHAT, ask)
    _, answer = decoder.ask(CHAT, ask | {"kv_transfer_params": reference["kv_transfer_params"]})
    assert answer["choices"] == plain["choices"]
    assert answer["kvferry"]["recomputed"] == ""


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (ask_for(40, kv_transfer_params=EARLY), "set stream to true"),
        (ask_for(40, kv_transfer_params={"do_remote_decode": True}, stream=True), "set stream to false"),
        (ask_for(40, kv_transfer_params=EARLY | {"kvferry": {"early": False}}, stream=True), "set stream to false"),
        (ask_for(40, kv_transfer_params=EARLY | {"kvferry": ["early"]}, stream=True), "set stream to false"),
    ],
)
def test_early_and_streamed_go_together(prefiller: Served, body: dict[str, Any], hint: str) -> None:
    status, answer = prefiller.ask(COMPLETIONS, body)
    assert status == 400
    assert hint in answer["error"]["message"]


def test_a_client_that_leaves_takes_its_promise_back(loop: Loop, prefiller: Served) -> None:
    """The blocks come back when the transfer says so, and no sooner."""
    fence = prefiller.transfer.fence
    loop.loop.call_soon_threadsafe(fence.clear)
    with between_steps(prefiller.engine):
        stream = Stream(prefiller, early())
        promise = prefiller.transfer.offers.promised[id_of(next(stream))]
        stream.leave()
        loop.run(promise.over.wait())
        assert prefiller.engine.block_usage().num_leased == 1
    assert prefiller.engine.block_usage().granted == (44,)
    loop.loop.call_soon_threadsafe(fence.set)


def test_a_lease_that_ends_first_ends_the_prefill(prefiller: Served) -> None:
    with between_steps(prefiller.engine):
        stream = Stream(prefiller, early())
        request_id = id_of(next(stream))
        prefiller.engine.release(request_id)  # as the transfer does
        error = next(stream)["error"]
        assert error["code"] == "aborted"
        assert "the transfer was cancelled" in error["message"]
        assert stream.at_end()
    assert request_id in prefiller.transfer.aborted
    stream.leave()


def test_a_prefill_that_fails_takes_its_promise_back(loop: Loop, prefiller: Served) -> None:
    with between_steps(prefiller.engine):
        stream = Stream(prefiller, early())
        request_id = id_of(next(stream))
        prefiller.engine._post(Produced(request_id, (), 0, True, "boom"))
        assert next(stream)["error"]["message"] == "the engine could not answer"
        assert stream.at_end()
        loop.run(asyncio.wait_for(prefiller.transfer.offers.promised[request_id].over.wait(), DEADLINE_S))
    stream.leave()


def test_what_is_told_layer_by_layer_is_computed_and_stays(loop: Loop, model_path: Path) -> None:
    """The bytes of each state, at the moment at which it is said to be there, are those at the end."""
    engine = Engine(Settings(str(model_path), block_tokens=16, num_blocks=320, max_batch_tokens=256, layer_wise=True))
    emitted: list[tuple[Ahead, dict[str, bytes]]] = []
    handle = engine._core._loop_state.emit

    def emit(event: Event) -> None:
        """In the engine's thread, in the middle of its step."""
        if isinstance(event, Progressed) and event.ahead.num_states:
            emitted.append((event.ahead, states_of(engine, event.block_tables[0], event.ahead.num_tokens)))
        handle(event)

    object.__setattr__(engine._core._loop_state, "emit", emit)

    async def compute() -> tuple[list[Ahead], dict[str, bytes]]:
        await engine.start()
        await engine.begin(request("early", NUM_TOKENS, 1))
        told: list[Ahead] = []
        prefilled = await engine.finish("early", lambda grown: told.append(grown.ahead))
        whole = states_of(engine, tuple(prefilled.block_tables[0]), NUM_TOKENS)
        engine.release("early")
        # What steps compute after it is not its own.
        await engine.prefill(request("plain", 40, 1))
        engine.release("plain")
        await engine.idle()
        return [ahead for ahead in told if ahead.num_states], whole

    try:
        told, whole = loop.run(compute())
    finally:
        loop.run(engine.close())
    names = list(whole)
    assert [ahead for ahead, _ in emitted] == told
    assert [ahead.num_tokens for ahead in told] == [n for n in (256, 512, NUM_TOKENS) for _ in names[::2]]
    assert [ahead.num_states for ahead in told] == 3 * list(range(2, len(names) + 1, 2))
    for ahead, there in emitted:
        for name in names[: ahead.num_states]:
            assert whole[name].startswith(there[name])
            assert any(there[name])


def states_of(engine: Engine, table: tuple[int, ...], num_tokens: int) -> dict[str, bytes]:
    """The bytes of each state, in the layout's order, of the first tokens of an engine with one cache group."""
    layout, memory = engine.layout(), engine.memory()
    where, (group,) = layout.placement_of(), layout.groups
    found: dict[str, bytes] = {}
    for state in layout.states:
        place = where[state.name]
        row_bytes = state.item_bytes * len(place.spans[0]) * len(place.spans[1])
        starts = (
            memory.address
            + place.offset
            + table[t // group.block_tokens] * place.block_stride
            + t % group.block_tokens * place.token_stride
            for t in range(num_tokens)
        )
        found[state.name] = b"".join(ctypes.string_at(start, row_bytes) for start in starts)
    return found
