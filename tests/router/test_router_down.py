"""What is open on an instance that a probe finds down: tried elsewhere before its first byte, ended after it.

Probes are an hour apart: each round is the test's own. Hosts that are cut off are in tests/e2e/test_silent_hosts.py.
"""

from __future__ import annotations

import asyncio

import pytest
from router_harness import (
    DEADLINE_S,
    DONE,
    ONE,
    STREAM,
    chat_chunk,
    cluster,
    decode_engine,
    decoding,
    frame,
    hanging,
    open_stream,
    prefill_engine,
    stalling,
)
from test_router_early import EARLY_DECODES, LONG, Prompt, early_engine

from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.probes import Prober

ERRORS = 'kvferry_router_upstream_errors_total{reason="instance_down",role="%s"}'


def find_down(c, engine):
    """Its next probe fails."""
    engine.health_status = 500
    return probe(c)


async def probe(c) -> None:
    services = c.app.state.services
    await Prober(services.http, services.pool, services.config).probe_all()


@pytest.mark.parametrize("num_others", [0, 1])
async def test_a_prefill_request_is_tried_elsewhere_at_once(num_others):
    others = [prefill_engine("p1") for _ in range(num_others)]
    silent = prefill_engine("p0", hanging)
    async with cluster([silent, *others], [decode_engine()]) as c:
        asking = asyncio.create_task(c.complete())
        await silent.arrived.wait()
        await find_down(c, silent)
        reply = await asking
        path = "disaggregated" if others else "decode-only"
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, path)
        assert await c.metric(ERRORS % "prefill") == 1
        await silent.left.wait()


async def test_a_decode_request_is_tried_elsewhere_at_once():
    silent, other = decode_engine("d0", hanging), decode_engine("d1")
    async with cluster([prefill_engine()], [silent, other]) as c:
        asking = asyncio.create_task(c.complete())
        await silent.arrived.wait()
        await find_down(c, silent)
        assert (await asking).status == 200
        assert await c.metric(ERRORS % "decode") == 1


async def test_the_only_decode_that_is_down_is_told_to_the_client():
    silent = decode_engine("d0", hanging)
    async with cluster([], [silent]) as c:
        asking = asyncio.create_task(c.complete())
        await silent.arrived.wait()
        await find_down(c, silent)
        reply = await asking
        assert (reply.status, reply.error["reason"]) == (502, "instance_down")


async def test_a_stream_that_is_silent_ends_with_an_error_event():
    d = decode_engine("d0", stalling(ONE))
    async with cluster([], [d], probe_timeout_s=2.0) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            assert await response.content.readany() == ONE
            reading = asyncio.create_task(response.content.read())
            # Said at each probe: what has just been heard of may still be on its way.
            while not reading.done():
                await find_down(c, d)
            rest = await reading
        assert b'"reason":"instance_down"' in rest
        assert b"[DONE]" not in rest


async def test_a_stream_that_goes_on_refutes_its_probe():
    may_end = asyncio.Event()

    async def behave(request, seen):
        response = await open_stream(request)
        await response.write(ONE)
        await may_end.wait()
        await response.write(frame(chat_chunk("two")) + DONE)
        return response

    d = decode_engine("d0", behave)
    async with (
        cluster([], [d], probe_timeout_s=DEADLINE_S) as c,
        c.session.post(c.url + "/v1/completions", json=STREAM) as response,
    ):
        assert await response.content.readany() == ONE
        await find_down(c, d)
        may_end.set()
        assert b"[DONE]" in await response.content.read()


async def test_where_nobody_listens_any_more_what_is_open_goes_on():
    """A server that ends in order closes its listening socket first, and finishes what it has."""
    may_end = asyncio.Event()

    async def behave(request, seen):
        await may_end.wait()
        return await decoding(request, seen)

    d = decode_engine("d0", behave)
    async with cluster([], [d]) as c:
        asking = asyncio.create_task(c.complete())
        await d.arrived.wait()
        await next(iter(d.runner.sites)).stop()
        await probe(c)
        assert not c.app.state.pool.can_serve()
        may_end.set()
        assert (await asking).status == 200


async def test_an_instance_that_has_left_is_probed_as_long_as_something_is_open_there():
    silent = prefill_engine("p0", hanging)
    async with cluster([silent], [decode_engine()]) as c:
        pool = c.app.state.pool
        asking = asyncio.create_task(c.complete())
        await silent.arrived.wait()
        instance = next(one for one in pool.instances if one.url == silent.url)
        assert pool.remove(instance, Origin.COMMAND_LINE)
        await find_down(c, silent)
        assert (await asking).headers["x-kvferry-path"] == "decode-only"
        assert instance not in {state.instance for state in pool.probed_states}


async def test_an_early_prefill_that_is_down_ends_the_decode_request_that_waits_for_it():
    prompts = [Prompt(), Prompt()]
    for prompt in prompts[1:]:
        prompt.may_end.set()

    async def prefill(request, seen):
        return await prompts.pop(0)(request, seen)

    async def behave(request, seen):
        return await (hanging if len(d.seen) == 1 else decoding)(request, seen)

    d = decode_engine("d0", behave)
    engines = [early_engine("p0", prefill), early_engine("p1", prefill)]
    async with cluster(engines, [d], early_from_tokens=1) as c:
        asking = asyncio.create_task(c.complete(LONG))
        await d.arrived.wait()
        await find_down(c, next(engine for engine in engines if engine.seen))
        assert (await asking).status == 200
        assert await c.metric(EARLY_DECODES) == 2
        assert await c.metric(ERRORS % "prefill") == 1


async def test_a_question_that_needs_no_cache_is_asked_elsewhere_at_once():
    """Else a silent host takes all the time that the whole of it may take."""
    silent, other = decode_engine("d0", hanging), decode_engine("d1")
    async with cluster([], [silent, other]) as c:
        url, body = f"{c.url}/tokenize", {"model": "tiny", "prompt": "a"}
        questions = [asyncio.create_task(c.session.post(url, json=body)) for _ in range(2)]
        await silent.arrived.wait()
        await find_down(c, silent)
        assert {(await question).status for question in questions} == {200}
        assert await c.metric(ERRORS % "decode") >= 1
