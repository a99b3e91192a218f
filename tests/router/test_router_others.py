"""Engines of others, which do not tell a cache that did not come from any other trouble."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from router_harness import (
    DONE,
    ONE,
    STREAM,
    breaking,
    chat_chunk,
    cluster,
    decode_engine,
    decoding,
    frame,
    prefill_engine,
    stalling,
    streaming,
)

from kvferry.router.answers.engine_response import error_answer, event_data, streamed_error
from kvferry.router.fleet.instance import INSTANCE_BREAKER
from kvferry.router.fleet.instance_pool import PAIR_BREAKER
from kvferry.router.request.client_request import Endpoint, parse_request
from kvferry.router.request.prompt_cost import cost_of

ERROR = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
# As vLLM's: a status of 200, and then this.
BROKEN = frame(ERROR) + DONE


def failing_with_caches_of(name):
    """As vLLM does: 500, or in a stream an event."""

    async def behave(request, seen):
        if seen.body.get("kv_transfer_params", {}).get("remote_engine_id") != name:
            return await decoding(request, seen)
        if not seen.body.get("stream"):
            return web.json_response(ERROR, status=500)
        return await streaming(BROKEN)(request, seen)

    return behave


@pytest.mark.parametrize("body", [{"prompt": "a"}, STREAM], ids=["whole", "stream"])
async def test_a_prefill_whose_caches_do_not_come_takes_out_no_decode_instance(body):
    ds = [decode_engine(name, failing_with_caches_of("p0")) for name in ("d0", "d1")]
    async with cluster([prefill_engine("p0")], ds) as c:
        for _ in range(2 * (INSTANCE_BREAKER.num_failures + PAIR_BREAKER.num_failures)):
            reply = await c.complete(body)
            assert reply.status == 200
            assert b"Internal server error" not in reply.raw
        members = await c.members()
        assert {one["breaker"] for one in members["members"]} == {"closed"}
        assert {pair["decode"] for pair in members["broken_pairs"]} == {d.url for d in ds}


@pytest.mark.parametrize("prefill", [[], ["p0"]])
async def test_an_error_at_the_beginning_of_a_stream_is_that_of_an_answer_in_one_piece(prefill):
    """Where there is no other way. Libraries try again then, and alarms count it."""
    async with cluster([prefill_engine(name) for name in prefill], [decode_engine("d0", streaming(BROKEN))]) as c:
        reply = await c.complete(STREAM)
        assert (reply.status, reply.headers["content-type"]) == (500, "application/json")
        assert reply.raw == event_data(BROKEN.partition(b"\n\n")[0]).strip()
        assert 'status="500"} 1.0' in await c.metrics()


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({"type": "error", "error": {"type": "api_error", "message": "x"}}, None),
        ({"type": "error", "message": "x"}, {"type": "error", "message": "x"}),
        ({"type": "response.failed", "response": {"error": {"message": "x"}}}, {"message": "x"}),
    ],
)
def test_the_error_of_a_stream_as_that_of_an_answer_in_one_piece(data, answer):
    found = json.loads(error_answer(json.dumps(data).encode()))
    assert found == (data if answer is None else {"error": answer})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"response": {}}', b'{"response": {"error": null}}'])
def test_a_stream_that_says_nothing_of_its_error(data):
    assert json.loads(error_answer(data))["error"]["message"] == "the engine could not answer"


async def test_an_error_amid_a_stream_is_told_once_and_blames_nobody():
    """The engine has told the client. As with an error at once, the request may be the reason."""
    async with cluster([], [decode_engine("d0", streaming(ONE, BROKEN))]) as c:
        for _ in range(INSTANCE_BREAKER.num_failures):
            assert (await c.complete(STREAM)).raw == ONE + BROKEN
        await c.until_idle()
        counted = await c.metrics()
        assert f'path="decode-only",status="502"}} {INSTANCE_BREAKER.num_failures}.0' in counted
        assert f'{{reason="status_500",role="decode"}} {INSTANCE_BREAKER.num_failures}.0' in counted
        assert {one["breaker"] for one in (await c.members())["members"]} == {"closed"}


async def test_an_instance_that_breaks_every_stream_is_taken_out():
    async with cluster([], [decode_engine("d0", breaking(ONE))]) as c:
        for _ in range(INSTANCE_BREAKER.num_failures):
            assert b"upstream_broke_off" in (await c.complete(STREAM)).raw
        assert (await c.complete(STREAM)).status == 503


async def test_a_prompt_counts_as_cached_from_the_first_byte_on():
    prompt = "a prompt that is long enough to have a home " * 64
    task = cost_of(parse_request(json.dumps({"prompt": prompt, "stream": True}).encode(), Endpoint.COMPLETIONS))

    async with cluster([], [decode_engine("d0", stalling(ONE))]) as c:
        pool = c.app.state.pool
        (instance,) = pool.instances
        body = {"prompt": prompt, "stream": True}
        async with c.session.post(c.url + "/v1/completions", json=body) as response:
            assert await response.content.readany() == ONE
            assert pool.prefixes.num_known(instance, task.prefixes) == len(task.prefixes) > 0


async def test_a_stream_that_ends_well_makes_good_for_those_that_broke_before():
    answers = []

    async def behave(request, seen):
        return await (decoding if answers.pop(0) else breaking(ONE))(request, seen)

    async with cluster([], [decode_engine("d0", behave)]) as c:
        almost = [False] * (INSTANCE_BREAKER.num_failures - 1)
        expected = [*almost, True, *almost, True]
        answers[:] = expected
        replies = [await c.complete(STREAM) for _ in expected]
        assert [b"[DONE]" in reply.raw for reply in replies] == expected


@pytest.mark.parametrize(
    ("piece", "status"),
    [
        (frame(ERROR), 500),
        (BROKEN, 500),
        (frame({"error": {"message": "too long", "code": 400}}), 400),
        (frame({"error": {"message": "?", "code": "odd"}}), 500),
        (frame({"error": {"message": "?", "code": 200}}), 500),
        (frame(chat_chunk("error")), 0),
        (frame({"choices": [], "error": None}), 0),
        (b'data: {"error": ', 0),
        (DONE, 0),
        (b": ping\n\n", 0),
        (json.dumps(ERROR).encode(), 0),
        (b"", 0),
    ],
)
def test_an_error_event_is_one_that_says_so(piece, status):
    assert streamed_error(piece) == status
