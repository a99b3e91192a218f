"""How long a client gives its request, and what becomes of one that takes longer."""

from __future__ import annotations

import asyncio
import json
import math
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from router_harness import ONE, STREAM, breaking, cluster, decode_engine, hanging, open_stream, prefill_engine, stalling

from kvferry.errors import RequestError
from kvferry.router.answers.answer_format import CHAT
from kvferry.router.events import INSTANCE_DOWN, TOO_LATE, Answered, Promised
from kvferry.router.fleet.instance import INSTANCE_BREAKER, OpenRequests
from kvferry.router.flow.upstream_request import Timeouts, UpstreamRequest
from kvferry.router.policy.records import Instance, Role
from kvferry.router.request.headers import decode_headers, timeout_of
from kvferry.router.telemetry.tracing import UpstreamTrace
from kvferry.router.upstream.http_client import HttpRequest

# Long enough for an engine in this process on a busy machine, short enough to wait for.
SHORT = {"x-kvferry-timeout": "2"}


@pytest.mark.parametrize(("told", "seconds"), [([], math.inf), ([b"30"], 30.0), ([b" 2.5 "], 2.5)])
def test_the_time_that_a_client_gives(told, seconds):
    assert timeout_of([(b"X-Kvferry-Timeout", value) for value in told]) == seconds


@pytest.mark.parametrize("told", [[b"0"], [b"0.0"], [b"-1"], [b"soon"], [b"nan"], [b"1e3"], [b""], [b"1", b"2"]])
def test_what_is_no_time_is_refused_in_words(told):
    with pytest.raises(RequestError, match="seconds above 0"):
        timeout_of([(b"x-kvferry-timeout", value) for value in told])


def test_the_time_is_the_routers_business():
    assert b"x-kvferry-timeout" not in dict(decode_headers([(b"x-kvferry-timeout", b"3")], "one"))


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_requests_that_take_too_long_are_504_and_nobody_is_to_blame(slow):
    p, d = prefill_engine(), decode_engine()
    engine = p if slow == "prefill" else d
    engine.behave = hanging
    async with cluster([p], [d]) as c:
        # More than would take out an instance that fails.
        num_requests = INSTANCE_BREAKER.num_failures + 1
        # On a busy machine the time of some is over before they are sent.
        while len(engine.seen) < num_requests:
            replies = await asyncio.gather(*(c.complete(headers=SHORT) for _ in range(num_requests)))
            assert {(reply.status, reply.error["reason"]) for reply in replies} == {(504, "request_deadline")}
        await engine.left.wait()
        assert "kvferry_router_upstream_errors_total{" not in await c.metrics()
        assert {one["breaker"] for one in (await c.members())["members"]} == {"closed"}


async def test_a_stream_that_takes_too_long_ends_with_that_word():
    d = decode_engine("d0", stalling(ONE))
    async with cluster([prefill_engine()], [d]) as c:
        async with c.session.post(c.url + "/v1/completions", json=STREAM, headers=SHORT) as response:
            body = await response.read()
        last = body.strip().split(b"\n\n")[-1]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["reason"]) == ("deadline_exceeded", "request_deadline")
        await d.left.wait()
        labels = 'endpoint="/v1/completions",path="disaggregated",status="502"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1


@pytest.mark.parametrize(
    ("limits", "headers"), [({"stall_timeout_s": 0.5}, {}), ({}, SHORT)], ids=["silence", "deadline"]
)
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.timeout(60)
@pytest.mark.slow
async def test_a_client_that_does_not_read_keeps_no_engine(limits, headers, streams):
    """What it does not take fills the buffers between: the router's part of them, 64 KiB, and the system's."""
    d = decode_engine("d0", endless if streams else huge)
    async with cluster([], [d], **limits) as c:
        place = urlsplit(c.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1)
        body = json.dumps({"model": "tiny", "prompt": "hello", "stream": streams}).encode()
        told = {"host": place.netloc, "content-length": str(len(body)), "content-type": "application/json", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        reader._transport.pause_reading()
        await d.arrived.wait()
        await c.until_idle()
        labels = 'endpoint="/v1/completions",path="decode-only",status="499"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1
        writer.close()


@pytest.mark.parametrize(("health", "blocked"), [(500, "http.response.start"), (200, "http.response.body")])
@pytest.mark.timeout(60)
async def test_a_client_that_does_not_take_the_last_word_keeps_nothing(health, blocked):
    """A refusal, and an error behind what it has taken."""
    body = [{"type": "http.request", "body": json.dumps(STREAM).encode(), "more_body": False}]

    async def receive():
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == blocked and not message.get("more_body"):
            await asyncio.Event().wait()

    d = decode_engine("d0", breaking(ONE))
    d.health_status = health
    async with cluster([], [d], stall_timeout_s=0.5) as c:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await c.app(scope | {"raw_path": b"/v1/completions"}, receive, send)
        await c.until_idle()


async def endless(request, seen):
    """A stream that goes on for as long as anybody takes it."""
    response = await open_stream(request)
    while True:
        await response.write(ONE * 1000)


async def huge(request, seen):
    """More than fits into any buffer."""
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 20))


def test_a_request_for_which_there_is_no_time_is_not_sent():
    outgoing = HttpRequest("POST", "http://127.0.0.1:1", "/v1/completions", [], b"")
    # Without a pool of connections, nothing can be sent.
    upstream = UpstreamRequest(
        SimpleNamespace(), SimpleNamespace(), UpstreamTrace(), outgoing, Timeouts(1.0, time.monotonic()), CHAT
    )
    assert asyncio.run(upstream.ask()).reason == TOO_LATE


async def test_an_answer_that_comes_when_it_is_given_up_is_no_broken_one():
    """The limit has been set to now, and the answer was there first: what comes after is read."""
    pool = SimpleNamespace(open_requests=OpenRequests())
    reservation = SimpleNamespace(instance=Instance("http://127.0.0.1:1", Role.PREFILL))
    outgoing = HttpRequest("POST", "http://127.0.0.1:1", "/v1/completions", [], b"")
    timeouts = Timeouts(10.0, time.monotonic() + 10.0)
    upstream = UpstreamRequest(SimpleNamespace(pool=pool), reservation, UpstreamTrace(), outgoing, timeouts, CHAT)

    async def promised():
        upstream.give_up(INSTANCE_DOWN)
        upstream._response = SimpleNamespace(whole=whole)
        return Promised(b"{}")

    async def whole(_max_bytes):
        return b'data: {"error": {"message": "x", "code": 500}}\n\n'

    upstream._ask = promised
    assert await upstream.ask() == Promised(b"{}")
    assert isinstance(await upstream.rest(), Answered)


async def test_what_is_no_time_is_a_400():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        reply = await c.complete(headers={"x-kvferry-timeout": "soon"})
        assert reply.status == 400
        assert "x-kvferry-timeout" in reply.error["message"]
