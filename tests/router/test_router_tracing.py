"""Spans of a request: prefill, decode, the phases that the engine told, one trace from the client to the engines."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from router_harness import (
    DONE,
    STREAM,
    TRANSFER,
    answer,
    cluster,
    decode_engine,
    failing,
    frame,
    open_stream,
    prefill_engine,
    resetting,
    web,
)

from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.opentelemetry import OtelTracing
from kvferry.router.telemetry.request_timing import RequestTiming

NONE = {}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


async def telling(request, seen):
    headers = {"server-timing": "queue;dur=1, wire;dur=2", "x-kvferry-cache": "received"}
    return web.json_response(answer("one"), headers=headers)


def spans_of(prefill, decode, limits=NONE, exporter=None, **options):
    """The finished spans of one request by name, and the engines that it went through."""
    exporter = exporter or InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = OtelTracing(provider)

    async def main():
        async with cluster([prefill], [decode], tracing=tracing, **limits) as c:
            await c.complete(**options)

    asyncio.run(main())
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_one_tree_of_spans_in_the_clients_trace():
    prefill, decode = prefill_engine(), decode_engine("d0", telling)
    spans = spans_of(prefill, decode, headers=CLIENT | {"x-request-id": "mine"})
    request, upstream = spans["kvferry.request"], (spans["kvferry.prefill"], spans["kvferry.decode"])
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert all(span.parent.span_id == request.context.span_id for span in upstream)
    assert all(spans[f"kvferry.{name}"].parent.span_id == upstream[1].context.span_id for name in ("queue", "wire"))
    assert spans["kvferry.wire"].end_time - spans["kvferry.wire"].start_time == 2_000_000
    assert spans["kvferry.wire"].start_time == spans["kvferry.queue"].end_time
    assert request.attributes["kvferry.request_id"] == "mine"
    assert request.attributes["kvferry.path"] == "disaggregated"
    assert request.attributes["kvferry.phase.wire_s"] == pytest.approx(0.002)
    for engine, span in ((prefill, upstream[0]), (decode, upstream[1])):
        sent = [value for name, value in engine.seen[0].headers.items() if name.lower() == "traceparent"]
        assert sent == [f"00-{TRACE_ID}-{span.context.span_id:016x}-01"]


def test_an_upstream_request_that_failed_says_so():
    spans = spans_of(prefill_engine("p0", failing(500, "no")), decode_engine())
    assert spans["kvferry.prefill"].attributes["kvferry.outcome"] == "status_500"
    assert not spans["kvferry.prefill"].status.is_ok
    assert spans["kvferry.request"].attributes["kvferry.reason"] == "prefill_failed"
    assert spans["kvferry.request"].status.is_ok


def test_the_span_of_a_stream_lasts_to_its_end_and_tells_how_it_ended():
    written = []

    async def breaking(request, seen):
        response = await open_stream(request)
        await response.write(frame({"x": 1}))
        written.append(time.time_ns())
        request.transport.close()
        return response

    spans = spans_of(prefill_engine(), decode_engine("d0", breaking), body=STREAM)
    decode, request = spans["kvferry.decode"], spans["kvferry.request"]
    assert decode.attributes["kvferry.outcome"] == "reset"
    assert not decode.status.is_ok
    assert decode.end_time > written[0]
    assert request.attributes["http.response.status_code"] == 502
    assert not request.status.is_ok


def test_an_answer_of_5xx_is_an_error_of_the_request():
    spans = spans_of(prefill_engine(), decode_engine("d0", failing(503, "no")))
    assert not spans["kvferry.request"].status.is_ok


def test_an_upstream_request_that_was_not_answered_does_not_say_that_it_was():
    spans = spans_of(prefill_engine("p0", resetting), decode_engine())
    assert [event.name for event in spans["kvferry.prefill"].events] == []
    assert [event.name for event in spans["kvferry.decode"].events] == ["answered"]


def test_an_upstream_request_that_nobody_ended_is_ended_with_its_request():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = OtelTracing(provider).begin([], "mine")
    request.upstream_began(Instance("http://d0", Role.DECODE))
    request.ended({})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["kvferry.decode"].attributes["kvferry.outcome"] == "unknown"
    assert set(spans) == {"kvferry.request", "kvferry.decode"}


def test_what_one_engine_told_is_not_told_of_the_next():
    timing = RequestTiming(0.0)
    timing.began(Role.DECODE, 0.0)
    timing.answered(Role.DECODE, 1.0, [(b"server-timing", b"wire;dur=2")])
    assert timing.told == {"wire": 0.002}
    timing.began(Role.PREFILL, 2.0)
    assert timing.told == {}


async def test_without_tracing_the_clients_own_headers_pass():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        await c.complete(headers=CLIENT)
        for engine in (*c.prefill, *c.decode):
            assert CLIENT["traceparent"] in engine.seen[0].headers.values()


@pytest.mark.parametrize(("is_kept", "outcome"), [(True, "answered"), (False, "left")])
def test_requests_beside_one_another_have_spans_of_their_own(is_kept, outcome):
    """A prefill that nobody waits for any more has not failed."""

    async def prefilling(request, seen):
        response = await open_stream(request)
        await response.write(frame({"kv_transfer_params": TRANSFER}))
        await is_asked.wait()
        await (asyncio.sleep(0) if is_kept else asyncio.Event().wait())
        await response.write(DONE)
        await response.write_eof()
        return response

    async def behave(request, seen):
        is_asked.set()
        # The router has heard of the end.
        while is_kept and not exporter.get_finished_spans():
            await asyncio.sleep(0)
        return await telling(request, seen)

    exporter, is_asked = InMemorySpanExporter(), asyncio.Event()
    prefill = prefill_engine("p0", prefilling)
    prefill.info = {"epoch": "1", "early": True}
    spans = spans_of(prefill, decode_engine("d0", behave), {"early_from_tokens": 1}, exporter)
    early, decode = spans["kvferry.prefill"], spans["kvferry.decode"]
    assert early.start_time < decode.start_time < early.end_time <= spans["kvferry.request"].end_time
    assert [event.name for event in early.events] == ["answered"]
    assert early.attributes["kvferry.outcome"] == outcome
    assert early.status.status_code is StatusCode.UNSET
    assert decode.attributes["kvferry.outcome"] == "answered"
