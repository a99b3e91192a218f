"""A prefill request in a room: its caller knows what the cache is called, and the first token goes with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from embedded_server import Served
from embedded_support import DEADLINE_S, Loop, request

from kvferry import Reason
from kvferry.embedded.request.parse import decode_completion
from kvferry.embedded.serving.chunks import AnswerChunk
from kvferry.embedded.serving.service import ServeInfo, Service, TokenizedRequest
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import room_names

COMPLETIONS = "/v1/completions"
ROOM = (1 << 62) - 7


def ask_for(num_tokens: int, **ours: Any) -> dict[str, Any]:
    asked = {"prompt": list(request("", num_tokens).prompt), "max_tokens": 4, "return_token_ids": True}
    return asked | {"kv_transfer_params": {"do_remote_decode": True, "kvferry": ours}}


def told_of(prefiller: Served, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The answer, and what was told of its first token."""
    before = len(prefiller.transfer.first_tokens)
    status, answer = prefiller.ask(COMPLETIONS, body)
    assert status == 200, answer
    (first,) = prefiller.transfer.first_tokens[before:]
    return answer, first


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_the_cache_has_the_rooms_name_and_the_first_token_goes_with_it(
    loop: Loop, prefiller: Served, decoder: Served, num_tokens: int
) -> None:
    """The same room twice: one request after the other."""
    for _ in range(2):
        asked = ask_for(num_tokens, room=ROOM)
        answer, first = told_of(prefiller, asked)
        params = answer["kv_transfer_params"]
        assert params["remote_request_id"] == room_names(ROOM)[0]
        _, plain = decoder.ask(COMPLETIONS, asked | {"kv_transfer_params": None})
        assert [first.token_id] == plain["choices"][0]["token_ids"][:1] == answer["choices"][0]["token_ids"]
        assert (first.logprob, first.top_logprobs) == (None, ())
        status, _ = decoder.ask(COMPLETIONS, asked | {"kv_transfer_params": params})
        assert status == 200
        # Whoever decodes need not wait until it is computed.
        assert prefiller.transfer.offers.promised.pop(room_names(ROOM)[0]).num_tokens == num_tokens
        # The room is free when the engine has heard that its cache was read.
        loop.run(prefiller.engine.idle())


@pytest.mark.parametrize("ours", [{"room": ROOM}, {}])
def test_its_logprobs_go_with_it_where_they_are_asked_for(prefiller: Served, decoder: Served, ours: Any) -> None:
    asked = ask_for(40, **ours) | {"logprobs": 3}
    answer, first = told_of(prefiller, asked)
    _, plain = decoder.ask(COMPLETIONS, asked | {"kv_transfer_params": None})
    assert first.logprob == pytest.approx(plain["choices"][0]["logprobs"]["token_logprobs"][0], abs=1e-4)
    assert first.top_logprobs[0] == (first.token_id, pytest.approx(first.logprob))
    assert len(first.top_logprobs) == 3
    decoder.ask(COMPLETIONS, asked | {"kv_transfer_params": answer["kv_transfer_params"]})


def test_a_room_is_for_one_request_at_a_time(prefiller: Served) -> None:
    answer, _ = told_of(prefiller, ask_for(40, room=ROOM))
    aborted = list(prefiller.transfer.aborted)
    status, refused = prefiller.ask(COMPLETIONS, ask_for(50, room=ROOM))
    assert (status, "room is in use" in refused["error"]["message"]) == (400, True)
    # The first one's cache is still offered.
    assert prefiller.transfer.aborted == aborted
    assert prefiller.transfer.withdraw(answer["kv_transfer_params"])


@contextmanager
def waiting_for_room(loop: Loop, prefiller: Served) -> Iterator[Future[tuple[int, dict[str, Any]]]]:
    """A prefill request in a room, and an engine that is full with one that is `held`."""
    engine, promised = prefiller.engine, prefiller.transfer.offers.promised
    promised.pop(room_names(ROOM)[0], None)

    async def until_promised() -> None:
        while room_names(ROOM)[0] not in promised or not engine.block_usage().num_waiting:
            await asyncio.sleep(0)

    loop.run(engine.prefill(request("held", engine.block_usage().capacity[0] * 16 - 1, 1)))
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(prefiller.ask, COMPLETIONS, ask_for(40, room=ROOM))
        try:
            loop.run(until_promised())
            yield asking
        finally:
            engine.release("held")


def test_a_cache_is_promised_before_there_is_room_for_it(loop: Loop, prefiller: Served, decoder: Served) -> None:
    """Who reads it is asked at the same time, and does not wait long for a lease that does not exist."""
    with waiting_for_room(loop, prefiller) as asking:
        prefiller.engine.release("held")
        status, answer = asking.result()
    assert status == 200
    asked = ask_for(40) | {"kv_transfer_params": answer["kv_transfer_params"]}
    assert decoder.ask(COMPLETIONS, asked)[0] == 200


def test_a_promise_that_is_not_wanted_any_more_waits_for_no_room(loop: Loop, prefiller: Served) -> None:
    with waiting_for_room(loop, prefiller) as asking:
        request_id = prefiller.transfer.offers.request_ids[room_names(ROOM)[0]]
        prefiller.transfer.offers.release(room_names(ROOM)[0])
        status, answer = asking.result()
    assert (status, answer["error"]["code"]) == (502, "aborted")
    assert request_id in prefiller.transfer.aborted


def test_a_room_in_which_one_waits_is_not_for_another(loop: Loop, prefiller: Served) -> None:
    with waiting_for_room(loop, prefiller) as asking:
        aborted = list(prefiller.transfer.aborted)
        assert prefiller.ask(COMPLETIONS, ask_for(50, room=ROOM))[0] == 400
        assert prefiller.transfer.aborted == aborted
        prefiller.transfer.offers.release(room_names(ROOM)[0])
        assert asking.result()[0] == 502


def test_the_end_of_a_request_that_waited_in_a_room_does_not_end_the_next(loop: Loop, prefiller: Served) -> None:
    """The next comes as soon as the room is free: the one before does not know yet that it is over."""
    engine = prefiller.engine
    service = Service(engine, prefiller.transfer, ServeInfo(model="tiny", engine_id="e", created=1))
    ask = decode_completion(json.dumps(ask_for(40, room=ROOM)).encode())

    async def answer(call: TokenizedRequest) -> list[AnswerChunk]:
        async with aclosing(service.answer(call)) as pieces:
            return [piece async for piece in pieces]

    async def answer_once_free(call: TokenizedRequest) -> list[AnswerChunk]:
        while True:
            try:
                return await answer(call)
            except TransferError:
                raise
            except RequestError:  # the room is in use
                await asyncio.sleep(0)

    async def one_after_the_other() -> tuple[Any, list[AnswerChunk]]:
        before = asyncio.create_task(answer(await service.call("a", ask)))
        while not engine.block_usage().num_waiting:
            await asyncio.sleep(0)
        after = asyncio.create_task(answer_once_free(await service.call("b", ask)))
        prefiller.transfer.offers.release(room_names(ROOM)[0])
        (ended,) = await asyncio.gather(before, return_exceptions=True)
        engine.release("held")
        return ended, await asyncio.wait_for(after, DEADLINE_S)

    loop.run(engine.reserve(request("held", engine.block_usage().capacity[0] * 16 - 1, 1)))
    ended, (_, prefilled) = loop.run(one_after_the_other())
    assert ended.reason == Reason.ABORTED
    assert len(prefilled.token_ids) == 1
    assert prefiller.transfer.withdraw(prefilled.reference)


def test_a_promise_that_cannot_be_made_keeps_no_blocks(prefiller: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture waits until none is left."""

    async def refuse(*_: object) -> None:
        raise TransferError(Reason.ABORTED, "the agent has stopped")

    monkeypatch.setattr(prefiller.transfer, "promise", refuse)
    status, answer = prefiller.ask(COMPLETIONS, ask_for(40, room=ROOM))
    assert (status, answer["error"]["code"]) == (502, "aborted"), answer


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (ask_for(40, room="5"), "room in kv_transfer_params is invalid"),
        (ask_for(40, room=-1), "room in kv_transfer_params is invalid"),
        (ask_for(40, room=5, early=True) | {"stream": True}, "found: kvferry.room and kvferry.early"),
        (ask_for(40, room=5) | {"stream": True}, "set stream to false"),
    ],
)
def test_what_makes_no_sense_in_a_room_is_refused(prefiller: Served, body: dict[str, Any], words: str) -> None:
    status, answer = prefiller.ask(COMPLETIONS, body)
    assert (status, words in answer["error"]["message"]) == (400, True), answer
