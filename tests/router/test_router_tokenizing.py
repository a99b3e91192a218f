"""`/tokenize` and `/detokenize` through the router: one engine answers, and its answer is passed on."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from router_harness import (
    Behaviour,
    Cluster,
    Reply,
    Seen,
    cluster,
    decode_engine,
    failing,
    hanging,
    prefill_engine,
    resetting,
)

from kvferry.router.config import Registration
from kvferry.router.policy.records import Role

TOKENIZE = "/tokenize"
BODY = {"model": "tiny", "prompt": "hello"}
ANSWER = b'{"count":1, "max_model_len":2048,"tokens":[5], "token_strs":null}'


async def tokenizing(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.Response(body=ANSWER, content_type="application/json", headers={"x-engine": "yes"})


def serving(*models: str) -> dict:
    """What an engine of ours tells of itself."""
    return {"engine": "kvferry", "engine_id": "e", "epoch": "1", "models": list(models), "cache": "c"}


async def ask(c: Cluster, path: str = TOKENIZE, body: object = None, **options) -> Reply:
    async with c.session.post(c.url + path, json=BODY if body is None else body, **options) as response:
        return Reply(response.status, response.headers, await response.read())


@pytest.mark.timeout(60)
async def test_an_engine_is_left_with_the_client():
    d = decode_engine(behave=hanging)
    async with cluster([], [d]) as c:
        asking = asyncio.create_task(ask(c))
        await d.arrived.wait()
        asking.cancel()
        await d.left.wait()
        line = f'kvferry_router_requests_total{{endpoint="{TOKENIZE}",path="none",status="499"}}'
        while not await c.metric(line):
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", [TOKENIZE, "/detokenize"])
async def test_a_decode_instance_answers_and_its_answer_is_passed_on(path):
    p, d = prefill_engine(behave=tokenizing), decode_engine(behave=tokenizing)
    async with cluster([p], [d]) as c:
        response = await ask(c, path + "?a=b", headers={"x-request-id": "me", "authorization": "Bearer key"})
        assert (response.status, response.raw) == (200, ANSWER)
        assert (response.headers["x-engine"], response.headers["x-request-id"]) == ("yes", "me")
        (seen,) = d.seen
        headers = {name.lower(): value for name, value in seen.headers.items()}
        assert (seen.path, seen.body, p.seen) == (path + "?a=b", BODY, [])
        assert (headers["x-request-id"], headers["authorization"]) == ("me", "Bearer key")
        line = f'kvferry_router_requests_total{{endpoint="{path}",path="none",status="200"}}'
        assert await c.metric(line) == 1


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_error_of_the_engine_is_its_answer(status):
    d0, d1 = decode_engine("d0", failing(status, "words of the engine")), decode_engine("d1", tokenizing)
    async with cluster([], [d0, d1]) as c:
        response = await ask(c)
        assert (response.status, response.error["message"]) == (status, "words of the engine")
        assert (response.headers["retry-after"], d1.seen) == ("3", [])


async def test_an_instance_that_serves_the_model_is_asked_whatever_its_role():
    p, d = prefill_engine(behave=tokenizing), decode_engine(behave=failing(404, "no such model"))
    p.info, d.info = serving("tiny"), serving("other")
    p.ready_status = d.ready_status = 200
    async with cluster([p], [d]) as c:
        assert (await ask(c)).raw == ANSWER
        # Nobody has this one: an engine says so.
        assert (await ask(c, body=BODY | {"model": "third"})).status == 404


async def test_what_is_no_request_is_for_an_engine_to_refuse():
    d = decode_engine(behave=failing(400, "words of the engine"))
    async with cluster([], [d]) as c:
        for data in (b"{", b"[1]", b'{"model": 7}', b"\xff", b"[" * 100_000):
            async with c.session.post(c.url + TOKENIZE, data=data) as response:
                assert response.status == 400
            assert d.seen.pop().raw == data


@pytest.mark.parametrize("behave", [None, resetting], ids=["refused", "reset"])
async def test_another_instance_is_asked_when_one_cannot_be_reached(behave: Behaviour | None):
    d0, d1 = decode_engine("d0", behave or tokenizing), decode_engine("d1", tokenizing)
    async with cluster([], [d0, d1]) as c:
        if behave is None:
            await d0.stop()
        assert (await ask(c)).raw == ANSWER
        reason = "refused" if behave is None else "reset"
        for name in ("upstream_errors", "retries"):
            assert await c.metric(f'kvferry_router_{name}_total{{reason="{reason}",role="decode"}}') == 1
        if behave is None:
            assert [i.url for i in c.app.state.pool.healthy(Role.DECODE)] == [d1.url]


@pytest.mark.parametrize("path", [TOKENIZE, "/v1/messages/count_tokens"])
async def test_a_request_that_breaks_engines_off_is_sent_to_no_more_than_two(path):
    engines = [decode_engine(f"d{i}", resetting) for i in range(5)]
    async with cluster([], engines) as c:
        assert (await ask(c, path)).status == 502
        assert sum(len(each.seen) for each in engines) == 2


async def test_no_instance_that_answers_is_a_502_and_no_healthy_one_a_503():
    p, d = prefill_engine(), decode_engine()
    async with cluster([p], [d]) as c:
        await p.stop()
        await d.stop()
        for status, code in ((502, "upstream_unavailable"), (503, "no_instance")):
            response = await ask(c)
            assert (response.status, response.error["code"]) == (status, code)
            assert d.url.removeprefix("http://") not in response.raw.decode()
    async with cluster([], [], registration=Registration(is_open=True)) as c:
        assert (await ask(c)).status == 503
        async with c.session.post(c.url + "/v1/messages/count_tokens", json={}) as counted:
            refused = await counted.json()
    # Anthropic's clients read no other errors.
    assert (refused["type"], refused["error"]["type"], refused["error"]["code"]) == (
        "error",
        "api_error",
        "no_instance",
    )


@pytest.mark.parametrize(
    ("limits", "headers", "code"),
    [
        ({"prefill_timeout_s": 1.0}, {}, "upstream_timeout"),
        ({}, {"x-kvferry-timeout": "1"}, "deadline_exceeded"),
    ],
)
async def test_time_is_limited(limits, headers, code):
    d = decode_engine(behave=hanging)
    async with cluster([], [d], **limits) as c:
        response = await ask(c, headers=headers)
        assert (response.status, response.error["code"]) == (504, code)
        await d.left.wait()


async def test_too_long_bodies_and_bad_ids_are_refused_and_counted():
    d = decode_engine(behave=tokenizing)
    async with cluster([], [d], max_body_bytes=100) as c:
        assert (await ask(c, body={"prompt": "x" * 100})).status == 413
        assert (await ask(c, headers={"x-request-id": "a,b"})).status == 400
        async with c.session.get(c.url + TOKENIZE) as response:
            assert response.status == 405
        for status in (400, 405, 413):
            line = f'kvferry_router_requests_total{{endpoint="/tokenize",path="none",status="{status}"}}'
            assert await c.metric(line) == 1
        assert d.seen == []
