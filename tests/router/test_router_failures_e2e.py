"""The router on real sockets when engines fail, fall silent, die, or the client leaves."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest
from aiohttp import web
from router_harness import (
    DONE,
    ONE,
    STREAM,
    breaking,
    cluster,
    decode_engine,
    failing,
    hanging,
    prefill_engine,
    prefilling,
    resetting,
    stalling,
)

from kvferry.router.policy.records import Role

ERRORS = "kvferry_router_upstream_errors_total"
RETRIES = "kvferry_router_retries_total"
FALLBACKS = "kvferry_router_fallbacks_total"
# Long enough for an engine in this process on a busy machine, short enough to wait for.
SHORT_S = 2.0


@pytest.mark.parametrize(
    ("behave", "reason"), [(resetting, "reset"), (failing(500, "oops"), "status_500"), (hanging, "deadline")]
)
async def test_a_failed_prefill_is_tried_on_another_instance(behave, reason):
    limit_s = SHORT_S if behave is hanging else 20.0
    p0, p1 = prefill_engine("p0", behave), prefill_engine("p1")
    async with cluster([p0, p1], [decode_engine()], prefill_timeout_s=limit_s) as c:
        response = await c.complete()
        assert (response.status, response.headers["x-kvferry-path"]) == (200, "disaggregated")
        assert c.decode[0].seen[0].body["kv_transfer_params"]["remote_engine_id"] == "p1"
        assert await c.metric(f'{ERRORS}{{reason="{reason}",role="prefill"}}') == 1
        assert await c.metric(f'{RETRIES}{{reason="{reason}",role="prefill"}}') == 1
        if behave is hanging:
            await p0.left.wait()


async def test_a_prefill_that_is_gone_is_refused_tried_elsewhere_and_marked_down():
    p0, p1 = prefill_engine("p0"), prefill_engine("p1")
    async with cluster([p0, p1], [decode_engine()]) as c:
        await p0.stop()
        response = await c.complete()
        assert response.headers["x-kvferry-path"] == "disaggregated"
        assert await c.metric(f'{RETRIES}{{reason="refused",role="prefill"}}') == 1
        assert [i.url for i in c.app.state.pool.healthy(Role.PREFILL)] == [p1.url]
        assert (await c.complete()).status == 200
        assert await c.metric(f'{RETRIES}{{reason="refused",role="prefill"}}') == 1


async def test_a_request_that_meets_several_engines_that_have_just_died_is_answered():
    prefill, decode = ([make(f"{i}") for i in range(4)] for make in (prefill_engine, decode_engine))
    async with cluster(prefill, decode) as c:
        for engine in (*prefill[:3], *decode[:3]):
            await engine.stop()
        responses = await asyncio.gather(*(c.complete() for _ in range(4)))
        assert [one.status for one in responses] == [200] * 4
        assert {one.headers["x-kvferry-path"] for one in responses} == {"disaggregated"}


async def test_two_failed_prefills_fall_back_to_decode_alone():
    prefill = [prefill_engine(name, failing(503, "down")) for name in ("p0", "p1", "p2")]
    async with cluster(prefill, [decode_engine()]) as c:
        response = await c.complete()
        assert (response.status, response.headers["x-kvferry-path"]) == (200, "decode-only")
        assert [len(engine.seen) for engine in prefill] == [1, 1, 0]
        assert "kv_transfer_params" not in c.decode[0].seen[0].body
        assert await c.metric(f'{FALLBACKS}{{reason="prefill_failed"}}') == 1


async def test_without_prefill_instances_decode_serves_alone():
    async with cluster([], [decode_engine()]) as c:
        raw = b'{ "prompt":"a", "max_tokens" : 3 }'
        async with c.session.post(c.url + "/v1/completions", data=raw) as response:
            assert (response.status, response.headers["x-kvferry-path"]) == (200, "decode-only")
        assert c.decode[0].seen[0].raw == raw
        assert await c.metric(f'{FALLBACKS}{{reason="no_prefill_instance"}}') == 1


async def test_a_prefill_answer_that_is_too_long_is_a_failure():
    async def behave(request, seen):
        return web.json_response({"x": "y" * 5000})

    async with cluster([prefill_engine("p0", behave)], [decode_engine()], max_answer_bytes=1000) as c:
        assert (await c.complete()).headers["x-kvferry-path"] == "decode-only"
        assert await c.metric(f'{ERRORS}{{reason="malformed",role="prefill"}}') == 1


@pytest.mark.parametrize(("behave", "reason"), [(resetting, "reset"), (hanging, "deadline")])
async def test_a_failed_decode_is_tried_elsewhere_with_a_fresh_prefill(behave, reason):
    limit_s = SHORT_S if behave is hanging else 20.0
    p, d0, d1 = prefill_engine(), decode_engine("d0", behave), decode_engine("d1")
    async with cluster([p], [d0, d1], decode_timeout_s=limit_s) as c:
        response = await c.complete()
        assert (response.status, response.headers["x-kvferry-path"]) == (200, "disaggregated")
        assert [len(engine.seen) for engine in (p, d0, d1)] == [2, 1, 1]
        assert await c.metric(f'{RETRIES}{{reason="{reason}",role="decode"}}') == 1


async def test_a_stream_that_ends_after_its_head_is_still_tried_elsewhere():
    d0, d1 = decode_engine("d0", breaking(b"")), decode_engine("d1")
    async with cluster([prefill_engine()], [d0, d1]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            assert b"[DONE]" in await response.read()
        assert (len(d0.seen), len(d1.seen)) == (1, 1)


@pytest.mark.parametrize(("behave", "status"), [(resetting, 502), (hanging, 504), (failing(507, "full"), 507)])
async def test_the_only_decode_instance_failing_is_told(behave, status):
    limit_s = SHORT_S if behave is hanging else 20.0
    async with cluster([prefill_engine()], [decode_engine("d0", behave)], decode_timeout_s=limit_s) as c:
        response = await c.complete()
        assert response.status == status
        assert "127.0.0.1" not in response.error["message"]
        assert len(c.prefill[0].seen) == 1


@pytest.mark.parametrize("tail", [b"", b'data: {"half": '])
@pytest.mark.parametrize("prefill", [[], ["p0"]])
async def test_a_stream_that_breaks_ends_with_an_error_frame_and_no_done(prefill, tail):
    """The half of an event is kept from the client: one of broken JSON would be all that OpenAI's library tells."""
    delivered = asyncio.Event()
    d0, d1 = decode_engine("d0", breaking(ONE + tail, delivered)), decode_engine("d1")
    async with cluster([prefill_engine(name) for name in prefill], [d0, d1]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            assert await response.content.readexactly(len(ONE)) == ONE
            delivered.set()
            rest = await response.content.read()
        assert b"[DONE]" not in rest
        assert rest.startswith(b"data: ")
        assert json.loads(rest.strip().removeprefix(b"data: "))["error"]["code"] == "upstream_broke_off"
        assert rest.endswith(b"}\n\n")
        assert d1.seen == []
        assert await c.metric(f'{ERRORS}{{reason="reset",role="decode"}}') == 1
        path = "disaggregated" if prefill else "decode-only"
        labels = f'endpoint="/v1/completions",path="{path}",status="502"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1


async def test_the_openai_client_sees_a_broken_stream_as_an_error():
    delivered = asyncio.Event()
    async with (
        cluster([prefill_engine()], [decode_engine("d0", breaking(ONE, delivered))]) as c,
        openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "hello"}]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "one"
        delivered.set()
        with pytest.raises(openai.APIError, match="was interrupted"):
            await anext(stream)


async def test_a_silent_stream_is_ended_and_its_engine_told():
    d = decode_engine("d0", stalling(ONE))
    async with cluster([prefill_engine()], [d], stall_timeout_s=SHORT_S) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            body = await response.read()
        assert b"the engine sent nothing for too long" in body
        assert b"[DONE]" not in body
        await d.left.wait()


async def half(request, seen):
    """Half an answer in one piece, in two pieces."""
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"half": "' + b"x" * 1000)
    await response.write(b"x")
    request.transport.close()
    return response


@pytest.mark.parametrize(
    ("num_prefill", "limits", "path"),
    [(0, {}, "decode-only"), (1, {"max_answer_bytes": 900}, "disaggregated")],
    ids=["alone", "long"],
)
async def test_a_broken_answer_without_frames_is_cut(num_prefill, limits, path):
    ps = [prefill_engine() for _ in range(num_prefill)]
    async with cluster(ps, [decode_engine("d0", half)], **limits) as c:
        async with c.session.post(c.url + "/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        labels = f'endpoint="/v1/completions",path="{path}",status="502"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1


async def test_a_broken_answer_of_which_nothing_has_been_passed_on_is_an_error():
    """The router keeps it, since the usage is at its end."""
    async with cluster([prefill_engine()], [decode_engine("d0", half)]) as c:
        reply = await c.complete()
        assert (reply.status, reply.error["code"], reply.error["reason"]) == (502, "upstream_unavailable", "reset")
        labels = 'endpoint="/v1/completions",path="disaggregated",status="502"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1
        assert await c.metric('kvferry_router_upstream_errors_total{reason="reset",role="decode"}') == 1


async def test_a_server_killed_mid_stream():
    d = decode_engine("d0", stalling(ONE))
    async with cluster([prefill_engine()], [d]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            await response.content.readany()
            await d.stop()
            body = await response.content.read()
        assert b'"error"' in body
        assert b"[DONE]" not in body
        assert (await c.complete()).status == 503


async def test_a_client_that_leaves_during_prefill_frees_the_prefill_engine():
    p0, p1, d = prefill_engine("p0", hanging), prefill_engine("p1"), decode_engine()
    async with cluster([p0, p1], [d]) as c:
        task = asyncio.create_task(c.complete())
        await p0.arrived.wait()
        task.cancel()
        await p0.left.wait()
        assert (p1.seen, d.seen) == ([], [])
        assert await idle(c)


async def test_a_client_that_leaves_before_the_first_byte_frees_the_decode_engine():
    d0, d1 = decode_engine("d0", hanging), decode_engine("d1")
    async with cluster([prefill_engine()], [d0, d1]) as c:
        task = asyncio.create_task(c.complete())
        await d0.arrived.wait()
        task.cancel()
        await d0.left.wait()
        assert d1.seen == []
        assert await idle(c)


async def test_a_client_that_leaves_mid_stream_frees_the_decode_engine():
    d = decode_engine("d0", stalling(ONE))
    async with cluster([prefill_engine()], [d]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            await response.content.readany()
            response.close()
        await d.left.wait()
        assert await idle(c)


async def test_an_engine_that_breaks_off_after_the_last_event_has_served():
    delivered = asyncio.Event()
    d = decode_engine("d0", breaking(ONE + DONE, delivered))
    async with cluster([], [d]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM) as response:
            assert await response.content.readexactly(len(ONE + DONE)) == ONE + DONE
            delivered.set()
            assert await response.content.read() == b""
        assert await idle(c, status=200)
        assert 'status="502"' not in await c.metrics()
        assert await c.metric(f'{ERRORS}{{reason="reset",role="decode"}}') == 0


LAST = {
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/responses": b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
    "/v1/messages": b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
}


@pytest.mark.parametrize("path", LAST)
async def test_a_client_that_has_all_and_does_not_wait_for_the_end_was_served(path):
    """As Codex does."""
    d = decode_engine("d0", stalling(ONE + LAST[path]))
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    asked = {"input": "a"} if path == "/v1/responses" else asked
    async with cluster([], [d]) as c:
        body = {"model": "tiny", "stream": True, "max_tokens": 9, **asked}
        async with c.session.post(c.url + path, json=body) as response:
            found = b""
            while LAST[path] not in found:
                found += await response.content.readany()
            response.close()
        await d.left.wait()
        assert await idle(c, status=200)
        assert 'status="499"' not in await c.metrics()


async def idle(c, status=499) -> bool:
    """Whether the router counts the request as answered so (left by its client) and nothing as in flight.

    The engine sees the end a moment before the router has put everything away, so one more request on another
    connection is not enough to wait for: the in-flight gauge is read until it is zero.
    """
    while True:
        lines = (await c.metrics()).splitlines()
        loads = [line for line in lines if line.startswith("kvferry_router_in_flight_requests{")]
        left = [line for line in lines if f'status="{status}"' in line and "_total" in line]
        if left and all(line.endswith(" 0.0") for line in loads):
            return True


async def test_an_instance_that_comes_back_is_used_again():
    d = decode_engine()
    async with cluster([], [d], probe_interval_s=0.05) as c:
        port = int(d.url.rsplit(":", 1)[1])
        await d.stop()
        await c.until_health_changes()
        assert (await c.complete()).status == 503
        await d.start(port)
        await c.until_health_changes()
        assert (await c.complete()).status == 200


async def test_an_instance_that_drops_one_connection_is_probed_at_once_and_serves_others():
    """With an hour between probes."""
    d = decode_engine("d0", resetting)
    async with cluster([], [d]) as c:
        d.probed.clear()
        assert (await c.complete()).status == 502
        d.behave = failing(418, "alive")
        assert (await c.complete()).status == 418
        await d.probed.wait()


async def test_an_instance_that_is_gone_after_a_hiccup_is_found_out_at_once():
    """With an hour between probes."""
    d = decode_engine("d0", resetting)
    async with cluster([], [d]) as c:
        assert (await c.complete()).status == 502
        d.health_status = 500
        assert (await c.complete()).status == 502
        while c.app.state.pool.healthy(Role.DECODE):
            await c.until_health_changes()
        assert (await c.complete()).status == 503


async def test_metrics_say_which_instance_fails_and_the_log_in_which_words(caplog):
    bad, good = decode_engine("d0", failing(500, "CUDA error: device-side assert")), decode_engine("d1")
    async with cluster([], [bad, good]) as c:
        while not await c.metric(f'kvferry_router_instance_failing{{instance="{bad.url}",role="decode"}}'):
            assert (await c.complete()).status == 200
        errors = 'kvferry_router_instance_errors_total{instance="%s",reason="status_500",role="decode"}'
        assert await c.metric(errors % bad.url) == 5
        assert await c.metric(errors % good.url) == 0
        assert await c.metric(f'kvferry_router_instance_failing{{instance="{good.url}",role="decode"}}') == 0
    assert "CUDA error: device-side assert" in caplog.text


async def test_an_unhealthy_answer_to_a_probe_takes_an_instance_out():
    p = prefill_engine("p0", prefilling("p0"))
    async with cluster([p], [decode_engine()], probe_interval_s=0.05) as c:
        p.health_status = 500
        await c.until_health_changes()
        assert (await c.complete()).headers["x-kvferry-path"] == "decode-only"
        line = f'kvferry_router_instance_healthy{{instance="{p.url}",role="prefill"}}'
        assert await c.metric(line) == 0
