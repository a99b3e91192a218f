"""A computed cache that nobody will read is released; the playbooks of a flow and the router on real sockets."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from router_harness import (
    DEADLINE_S,
    TRANSFER,
    answer,
    cluster,
    decode_engine,
    failing,
    hanging,
    prefill_engine,
    resetting,
)
from test_router_flow import D0, P0, REQUEST, failed, pick, play, to_prefilling

from kvferry.router.commands import Cancel, EndWithError, Forward, Refuse, Relay, Release, Send
from kvferry.router.events import Answered, ClientGone, Ended, Failed, Opened, Promised
from kvferry.router.flow import client
from kvferry.router.flow.state_machine import Flow
from kvferry.router.policy.records import NoInstance, Role
from kvferry.router.request.client_request import decode_body

PARAMS = b'{"do_remote_prefill": true, "kvferry": {"lease_id": "x"}}'
OURS = {**TRANSFER, "kvferry": {"lease_id": "x"}}
PREFILLED = Answered(200, b'{"kv_transfer_params": ' + PARAMS + b"}")
RELEASES = 'kvferry_router_releases_total{reason="%s"}'


def to_decoding():
    return (*to_prefilling(), (PREFILLED, [Send(D0, decode_body(REQUEST, PARAMS))]))


def released(reason):
    return Release(P0, b'{"kv_transfer_params": ' + PARAMS + b"}", reason)


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (ClientGone(), [released("client_left"), Cancel()]),
        (Answered(400, b"{}"), [released("decode_refused"), Forward()]),
        (Failed("reset", "x"), [failed(Role.DECODE, "reset"), released("decode_failed"), pick(Role.DECODE, D0)]),
        (
            Answered(500, b"{}"),
            [failed(Role.DECODE, "status_500"), released("decode_failed"), pick(Role.DECODE, D0, P0)],
        ),
    ],
)
def test_a_cache_that_decode_will_not_answer_from_is_released(event, commands):
    play(Flow(REQUEST), *to_decoding(), (event, commands))


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (ClientGone(), [Cancel()]),
        (
            Failed("stall", "y"),
            [
                failed(Role.DECODE, "stall"),
                EndWithError("the answer was interrupted: y", "upstream_broke_off", "stall"),
            ],
        ),
    ],
)
def test_an_answer_that_has_begun_has_read_its_cache(event, commands):
    play(Flow(REQUEST), *to_decoding(), (Opened(can_append=True), [Relay()]), (event, commands))


def test_a_cache_that_decode_could_not_read_is_released():
    """A broken link: decode cannot tell prefill either."""
    opened = Opened(can_append=True, is_recomputed=True)
    play(Flow(REQUEST), *to_decoding(), (opened, [released("recomputed"), Relay()]), (Ended(), []))


@pytest.mark.parametrize(
    ("last_word", "releases"),
    [
        (PREFILLED, [released("client_left")]),
        (Promised(PARAMS), [released("client_left")]),
        (Answered(500, PREFILLED.body), []),
        (Answered(200, b'{"kv_transfer_params": null}'), []),
        (Answered(200, b"{"), []),
        (None, []),
    ],
)
def test_what_prefill_has_answered_while_the_client_left_is_released(last_word, releases):
    play(Flow(REQUEST), *to_prefilling(), (ClientGone(last_word), [*releases, Cancel()]))


@pytest.mark.parametrize("params", [b'{"remote_block_ids": [1]}', b'{"kvferry": ', b'{"a": {}}'])
def test_what_other_engines_keep_is_left_to_them(params):
    flow = Flow(REQUEST)
    body = b'{"kv_transfer_params": ' + params + b"}"
    if params.endswith(b"}"):
        play(flow, *to_prefilling(), (Answered(200, body), [Send(D0, decode_body(REQUEST, params))]))
        play(flow, (ClientGone(), [Cancel()]))


def test_the_last_word_names_the_counter_that_moved():
    flow = Flow(REQUEST)
    play(flow, *to_decoding())
    flow.handle(Failed("deadline", "it took too long"))
    (last,) = flow.handle(NoInstance())
    assert isinstance(last, Refuse)
    assert (last.status, last.body["error"]["reason"], last.body["error"]["code"]) == (
        504,
        "deadline",
        "upstream_timeout",
    )


async def prefilled(request, seen):
    return web.json_response(answer("x", kv_transfer_params=OURS))


async def recomputing(request, seen):
    """An answer of a decode engine that could not read the cache."""
    return web.json_response(answer("x"), headers={"x-kvferry-cache": "recomputed"})


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (recomputing, "recomputed"),
        (resetting, "decode_failed"),
        (failing(500, "x"), "decode_failed"),
        (failing(400, "x"), "decode_refused"),
    ],
)
async def test_the_prefill_instance_is_told(behave, reason):
    async with cluster([prefill_engine("p0", prefilled)], [decode_engine("d0", behave)]) as c:
        await c.complete()
        assert await c.prefill[0].released.get() == {"kv_transfer_params": OURS}
        assert await c.metric(RELEASES % reason) == 1


async def test_the_prefill_instance_is_told_when_the_client_leaves():
    async with cluster([prefill_engine("p0", prefilled)], [decode_engine("d0", hanging)]) as c:
        asking = asyncio.create_task(c.complete())
        await c.decode[0].arrived.wait()
        asking.cancel()
        assert await c.prefill[0].released.get() == {"kv_transfer_params": OURS}
        assert await c.metric(RELEASES % "client_left") == 1


def crossing_a_client_that_leaves(monkeypatch, behave):
    """An engine that answers when the router has noticed that the client has left."""
    monkeypatch.setattr("kvferry.router.flow.dispatcher.LAST_ANSWER_S", DEADLINE_S)
    left, wait_until_gone = asyncio.Event(), client.until_disconnected

    async def noticed(receive):
        await wait_until_gone(receive)
        left.set()

    async def crossing(request, seen):
        await left.wait()
        return await behave(request, seen)

    monkeypatch.setattr(client, "until_disconnected", noticed)
    return crossing


async def check_released_when_the_client_leaves(c, body=None):
    """The decode instance hears nothing of the request."""
    asking = asyncio.create_task(c.complete(body))
    await c.prefill[0].arrived.wait()
    asking.cancel()
    assert await c.prefill[0].released.get() == {"kv_transfer_params": OURS}
    assert await c.metric(RELEASES % "client_left") == 1
    assert c.decode[0].seen == []


async def test_an_answer_of_prefill_that_is_under_way_when_the_client_leaves_is_heard(monkeypatch):
    """Its blocks are kept already, for a decode request that will not be."""
    crossing = crossing_a_client_that_leaves(monkeypatch, prefilled)
    async with cluster([prefill_engine("p0", crossing)], [decode_engine()]) as c:
        await check_released_when_the_client_leaves(c)


async def test_a_prefill_instance_that_is_gone_is_no_trouble():
    async with cluster([prefill_engine("p0", prefilled)], [decode_engine("d0", hanging)]) as c:
        asking = asyncio.create_task(c.complete())
        await c.decode[0].arrived.wait()
        await c.prefill[0].stop()
        asking.cancel()
        await c.decode[0].left.wait()
        assert await c.metric(RELEASES % "client_left") == 1
