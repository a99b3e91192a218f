"""Decode requests that begin while the prompt is still computed: playbooks, times, and the router on real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from types import SimpleNamespace

import pytest
from aiohttp import web
from router_harness import (
    DONE,
    ONE,
    Engine,
    answer,
    chat_chunk,
    cluster,
    decode_engine,
    decoding,
    failing,
    frame,
    hanging,
    open_stream,
    prefilling,
    record_limits,
    resetting,
    streaming,
)
from test_router_flow import D0, P0, REQUEST, failed, pick, play
from test_router_release import (
    OURS,
    PARAMS,
    check_released_when_the_client_leaves,
    crossing_a_client_that_leaves,
    released,
)

from kvferry.router.answers.answer_format import CHAT
from kvferry.router.answers.engine_response import promised_cache, stream_failure
from kvferry.router.commands import Cancel, Forward, Relay, Send
from kvferry.router.config import PrefillFallback
from kvferry.router.events import PREFILL_LOST, TOO_LATE, Answered, Began, ClientGone, Failed, Opened, Picked, Promised
from kvferry.router.fleet.instance import INSTANCE_BREAKER
from kvferry.router.fleet.instance_pool import KIND_BREAKER
from kvferry.router.flow import dispatcher, early_prefill
from kvferry.router.flow.early_prefill import EarlyPrefill
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.flow.state_machine import Flow
from kvferry.router.flow.upstream_request import Timeouts, UpstreamRequest
from kvferry.router.policy.records import NO_COST, Role
from kvferry.router.request.client_request import decode_body, prefill_body
from kvferry.router.request.request_kind import kind_of
from kvferry.router.telemetry.request_timing import RequestTiming, without_beginning
from kvferry.router.telemetry.tracing import UpstreamTrace
from kvferry.router.upstream.http_client import HttpRequest

PROMISE = frame({"choices": [], "kv_transfer_params": OURS})
EARLY_BODY = prefill_body(REQUEST, is_early=True)
EARLY_DECODES = "kvferry_router_early_decodes_total"
ERRORS = 'kvferry_router_upstream_errors_total{reason="%s",role="prefill"}'
LONG = {"model": "tiny", "prompt": "a" * 4000, "max_tokens": 9}
DEADLINE_S = 20.0


def to_promised():
    return (
        (Began(), [pick(Role.DECODE)]),
        (Picked(D0), [pick(Role.PREFILL)]),
        (Picked(P0, is_early=True), [Send(P0, EARLY_BODY)]),
        (Promised(PARAMS), [Send(D0, decode_body(REQUEST, PARAMS))]),
    )


# --- what is asked and understood


def test_an_early_prefill_request_is_a_stream_that_asks_for_its_reference():
    body = json.loads(EARLY_BODY)
    assert (body["stream"], body["max_tokens"]) == (True, 1)
    assert body["kv_transfer_params"]["kvferry"] == {"early": True}
    assert body["kv_transfer_params"]["do_remote_decode"]
    # Its last event tells what was cached of the prompt.
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("piece", "promised"),
    [
        (b'data: {"kv_transfer_params": {"a": 1}}\n\n', b'{"a": 1}'),
        (b'data: {"kv_transfer_params": {"a": 1}}\n\ndata: [DONE]\n\n', b'{"a": 1}'),
        (b'data: {"kv_transfer_params": null}\n\n', b""),
        (b'data: {"choices": []}\n\n', b""),
        (b'data: {"kv_transfer_params": {"a": 1}}', b""),
        (b'{"kv_transfer_params": {"a": 1}}\n\n', b""),
        (DONE, b""),
        (b": a comment\n\n", b""),
        (b"", b""),
    ],
)
def test_what_is_a_promise(piece, promised):
    assert promised_cache(piece) == promised


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', b""),
        (b'data: {"choices": []}\n\ndata: {"error": {"code": "aborted"}}\n\n', b'{"error": {"code": "aborted"}}'),
        (b"", b""),
    ],
)
def test_how_a_stream_has_ended(body, failure):
    assert stream_failure(body) == failure


# --- playbooks


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (Opened(can_append=True), [Relay()]),
        (ClientGone(), [released("client_left"), Cancel()]),
        (Failed("reset", "x"), [failed(Role.DECODE, "reset"), released("decode_failed"), pick(Role.DECODE, D0)]),
        (
            Answered(502, b'{"error": {"code": "aborted"}}'),
            [failed(Role.DECODE, "aborted"), released("decode_failed"), pick(Role.DECODE, P0)],
        ),
        (
            Failed(PREFILL_LOST, "x"),
            [failed(Role.DECODE, PREFILL_LOST), released("decode_failed"), pick(Role.DECODE, P0)],
        ),
        (Answered(400, b"{}"), [released("decode_refused"), Forward()]),
    ],
)
def test_decode_is_asked_with_the_promise_and_judged_as_ever(event, commands):
    play(Flow(REQUEST), *to_promised(), (event, commands))


# --- times


def timed(computed_s: float, told: bytes = b"") -> RequestTiming:
    """A promise after 1 s, decode from then on, a prompt that is computed at `computed_s`, an answer at 10 s."""
    timing = RequestTiming(0.0)
    timing.began(Role.PREFILL, 0.5)
    timing.answered(Role.PREFILL, 1.0, [])
    timing.promised()
    timing.began(Role.DECODE, 1.0)
    if computed_s < 10.0:
        timing.prefilled(computed_s)
    timing.answered(Role.DECODE, 10.0, [(b"server-timing", told)] if told else [])
    if computed_s >= 10.0:
        timing.prefilled(computed_s)
    return timing


def test_what_decode_did_while_the_prompt_was_computed_was_waiting_for_it():
    timing = timed(8.0, b"queue;dur=2000, claim;dur=1000, wire;dur=5500")
    assert timing.phases == pytest.approx(
        {"queue": 0.5, "prefill": 7.5, "decode_queue": 0.0, "claim": 0.0, "wire": 1.5, "first_decode": 0.5}
    )
    assert math.fsum(timing.phases.values()) == pytest.approx(10.0)
    assert timing.handover_s == pytest.approx(2.0)


def test_a_prompt_whose_end_is_heard_of_after_the_answer_tells_nothing_of_the_handover():
    timing = timed(11.0, b"wire;dur=8000")
    assert timing.handover_s == 0.0
    assert timing.phases == pytest.approx({"queue": 0.5, "prefill": 0.5, "wire": 8.0, "first_decode": 1.0})


@pytest.mark.parametrize("computed_s", [3.0, 6.0])
def test_what_was_computed_while_nobody_was_reached_is_prefill(computed_s):
    """A decode engine could not be reached from 1 to 5 s; the next one answers at 7."""
    timing = RequestTiming(0.0)
    timing.began(Role.PREFILL, 0.5)
    timing.answered(Role.PREFILL, 1.0, [])
    timing.promised()
    timing.began(Role.DECODE, 1.0)
    if computed_s < 5.0:
        timing.prefilled(computed_s)
    timing.answered(Role.DECODE, 5.0, [])
    timing.began(Role.DECODE, 5.0)
    if computed_s > 5.0:
        timing.prefilled(computed_s)
    timing.answered(Role.DECODE, 7.0, [])
    prefill_s = computed_s - 0.5
    first_s = 7.0 - max(computed_s, 5.0)
    waited_s = 7.0 - prefill_s - first_s
    assert timing.phases == pytest.approx({"queue": waited_s, "prefill": prefill_s, "first_decode": first_s})
    assert timing.handover_s == pytest.approx(first_s)


def test_the_times_of_one_try_are_not_those_of_the_next():
    timing = timed(8.0)
    timing.began(Role.PREFILL, 11.0)
    timing.answered(Role.PREFILL, 12.0, [])
    timing.began(Role.DECODE, 12.0)
    timing.answered(Role.DECODE, 13.0, [])
    assert timing.handover_s == pytest.approx(1.0)
    assert timing.phases == pytest.approx({"queue": 11.0, "prefill": 1.0, "first_decode": 1.0})


def test_what_a_lost_prefill_overlapped_is_not_taken_from_the_next_prefill():
    timing = timed(8.0)
    timing.began(Role.DECODE, 11.0)
    timing.answered(Role.DECODE, 12.0, [])
    assert math.fsum(timing.phases.values()) == pytest.approx(12.0)
    assert timing.phases["first_decode"] == pytest.approx(1.0)


def test_phases_are_cut_in_their_order():
    assert without_beginning({"a": 1.0, "b": 2.0, "c": 3.0}, 2.5) == {"a": 0.0, "b": 0.5, "c": 3.0}
    assert without_beginning({"a": 1.0}, 0.0) == {"a": 1.0}
    assert without_beginning({"a": 1.0}, 5.0) == {"a": 0.0}


# --- on sockets


def early_engine(name, behave) -> Engine:
    return Engine(name, behave, info={"engine": "kvferry", "epoch": f"{name}-1", "early": True})


class Prompt:
    """A prefill engine's behaviour: it promises at once, and goes on when it is told to."""

    def __init__(self, last: bytes = b"") -> None:
        self.may_end = asyncio.Event()
        self.last = last or frame(chat_chunk("x")) + DONE

    async def __call__(self, request, seen):
        assert seen.body["stream"]
        response = await open_stream(request)
        await response.write(PROMISE)
        await self.may_end.wait()
        if self.last == b"cut":
            request.transport.abort()
        else:
            await response.write(self.last)
        return response


async def prefill_of(c):
    """What the router knows of its prefill instance."""
    return next(one for one in (await c.members())["members"] if one["role"] == "prefill")


async def test_decode_begins_while_the_prompt_is_computed():
    prompt = Prompt()

    async def behave(request, seen):
        # The prompt is computed only after decode has been asked.
        assert seen.body["kv_transfer_params"] == OURS
        prompt.may_end.set()
        return await decoding(request, seen)

    p, d = early_engine("p0", prompt), decode_engine("d0", behave)
    async with cluster([p], [d], early_from_tokens=1000) as c:
        reply = await c.complete(LONG)
        assert reply.status == 200
        assert json.loads(reply.raw)["choices"][0]["text"] == "one two"
        assert reply.headers["x-kvferry-path"] == "disaggregated"
        await c.until_idle()
        assert await c.metric(EARLY_DECODES) == 1
        assert "kvferry_router_upstream_errors_total{" not in await c.metrics()
        assert p.released.empty()


@pytest.mark.parametrize("is_computed", [True, False])
async def test_a_promise_that_comes_when_the_client_leaves_is_released(monkeypatch, is_computed):
    """An engine that has ended its answer by then does not see that nobody wants it."""

    async def promising(request, seen):
        response = await open_stream(request)
        await response.write(PROMISE + (frame(chat_chunk("x")) + DONE if is_computed else b""))
        return response

    crossing = crossing_a_client_that_leaves(monkeypatch, promising)
    async with cluster([early_engine("p0", crossing)], [decode_engine()], early_from_tokens=1000) as c:
        await check_released_when_the_client_leaves(c, LONG)


@pytest.mark.parametrize("num_prefills", [1, 2, 3])
@pytest.mark.parametrize("fallback", PrefillFallback)
async def test_promises_that_every_prefill_breaks_leave_decode_alone(num_prefills, fallback):
    """As when every prefill instance refuses at once."""
    broken = frame({"error": {"message": "no tool call in this", "code": 500}}) + DONE

    async def behave(request, seen):
        return await (hanging if "kv_transfer_params" in seen.body else decoding)(request, seen)

    prompts = [Prompt(broken) for _ in range(num_prefills)]
    for prompt in prompts:
        prompt.may_end.set()
    ps = [early_engine(f"p{i}", prompt) for i, prompt in enumerate(prompts)]
    limits = {"early_from_tokens": 1, "prefill_fallback": fallback}
    async with cluster(ps, [decode_engine("d0", behave)], **limits) as c:
        refuses = fallback is PrefillFallback.REFUSE
        for _ in range(2 * KIND_BREAKER.num_failures):
            reply = await c.complete(LONG)
            assert reply.status == (503 if refuses else 200)
            assert ("retry-after" in reply.headers) is refuses
        assert {one["breaker"] for one in (await c.members())["members"]} == {"closed"}
        assert sum(len(p.seen) for p in ps) == min(num_prefills, 2) * KIND_BREAKER.num_failures


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
OF_PREFILL, OF_DECODE = ({**USAGE, "prompt_tokens_details": {"cached_tokens": num}} for num in (4, 8))
TOLD = frame({"choices": [], "usage": OF_PREFILL}) + DONE


@pytest.mark.parametrize("last", [TOLD, frame(chat_chunk("x")) + DONE])
async def test_the_figure_of_prefill_is_told_though_decode_has_answered_before(monkeypatch, last):
    monkeypatch.setattr(early_prefill, "LAST_USAGE_S", DEADLINE_S)
    prompt = Prompt(last)

    async def behave(request, seen):
        response = web.json_response(answer("one", usage=OF_DECODE))
        await response.prepare(request)
        await response.write_eof()
        prompt.may_end.set()
        return response

    async with cluster([early_engine("p0", prompt)], [decode_engine("d0", behave)], early_from_tokens=1) as c:
        details = json.loads((await c.complete(LONG)).raw)["usage"]["prompt_tokens_details"]
        assert details == (OF_PREFILL["prompt_tokens_details"] if last is TOLD else None)


async def test_no_token_waits_for_the_figure_of_prefill(monkeypatch):
    """Prefill ends its answer only when the client has all tokens; and a usage with each token waits for nothing."""
    monkeypatch.setattr(early_prefill, "LAST_USAGE_S", DEADLINE_S)
    prompt = Prompt(TOLD)

    first, second = (frame(chat_chunk(text, usage=OF_DECODE)) for text in ("one", " two"))
    behave = streaming(first, second + frame({"choices": [], "usage": OF_DECODE}) + DONE)
    async with (
        cluster([early_engine("p0", prompt)], [decode_engine("d0", behave)], early_from_tokens=1) as c,
        c.session.post(c.url + "/v1/completions", json=LONG | {"stream": True}) as response,
    ):
        events = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        prompt.may_end.set()
        rest = await response.read()
    events = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [event["choices"][0]["delta"]["content"] for event in events] == ["one", " two"]
    assert [event["usage"]["prompt_tokens_details"] for event in events] == [None, None]
    last, done, _ = rest.split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["usage"] == OF_PREFILL
    assert done == b"data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_request_without_an_end_does_not_keep_a_client(monkeypatch, stream):
    monkeypatch.setattr(early_prefill, "LAST_USAGE_S", 0.05)

    async def behave(request, seen):
        if not stream:
            return web.json_response(answer("one", usage=OF_DECODE))
        return await streaming(frame({"choices": [], "usage": OF_DECODE}) + DONE)(request, seen)

    p, d = early_engine("p0", Prompt()), decode_engine("d0", behave)
    async with cluster([p], [d], early_from_tokens=1) as c:
        raw = (await c.complete(LONG | {"stream": stream})).raw
        event = raw.partition(b"\n\n")[0].removeprefix(b"data: ") if stream else raw
        assert json.loads(event)["usage"]["prompt_tokens_details"] is None


async def test_how_fast_it_computes_is_seen_at_the_end_of_its_answer():
    prompt, is_asked, is_told = Prompt(), asyncio.Event(), asyncio.Event()

    async def behave(request, seen):
        is_asked.set()
        await is_told.wait()
        return await decoding(request, seen)

    async with cluster([early_engine("p0", prompt)], [decode_engine("d0", behave)], early_from_tokens=1) as c:
        asking = asyncio.create_task(c.complete(LONG))
        await is_asked.wait()
        p = await prefill_of(c)
        assert (p["prefill_tokens_per_s"], p["in_flight_requests"]) == (0, 1)
        prompt.may_end.set()
        while p["in_flight_requests"]:
            p = await prefill_of(c)
        assert p["prefill_tokens_per_s"] > 0
        is_told.set()
        assert (await asking).status == 200


@pytest.mark.parametrize(
    ("info", "from_tokens", "body"),
    [
        ({"early": True}, 0, LONG),
        ({"early": True}, 1000, {**LONG, "prompt": "short"}),
        ({}, 1000, LONG),
        ({"early": False}, 1000, LONG),
    ],
)
async def test_otherwise_the_prompt_is_computed_first(info, from_tokens, body):
    p = Engine("p0", prefilling("p0"), info={"engine": "kvferry", "epoch": "1", **info})
    async with cluster([p], [decode_engine()], early_from_tokens=from_tokens) as c:
        assert (await c.complete(body)).status == 200
        assert not p.seen[0].body["stream"]
        assert await c.metric(EARLY_DECODES) == 0


async def test_a_client_that_leaves_ends_both_requests():
    p, d = early_engine("p0", Prompt()), decode_engine("d0", hanging)
    async with cluster([p], [d], early_from_tokens=1) as c:
        await c.leave(LONG)
        assert await p.released.get() == {"kv_transfer_params": OURS}


BAD_ENDS = [
    (frame({"error": {"message": "x", "code": 500}}), "status_500"),
    (b"cut", "reset"),
    (frame(chat_chunk("x")), "malformed"),
    (b"x" * (2 << 20), "malformed"),
]


@pytest.mark.parametrize(("last", "reason"), BAD_ENDS)
async def test_a_promise_that_is_not_kept_is_made_by_another_at_once(last, reason, caplog):
    """Nobody waits until decode has found out."""
    broken, good = Prompt(last), Prompt()
    good.may_end.set()
    # Whichever is asked first.
    prompts = [broken, good]

    async def prefill(request, seen):
        return await prompts.pop(0)(request, seen)

    async def behave(request, seen):
        if len(d.seen) == 1:
            broken.may_end.set()
            return await hanging(request, seen)
        return await decoding(request, seen)

    d = decode_engine("d0", behave)
    engines = [early_engine("p0", prefill), early_engine("p1", prefill)]
    async with cluster(engines, [d], early_from_tokens=1) as c:
        assert (await c.complete(LONG)).status == 200
        await d.left.wait()
        assert [len(engine.seen) for engine in engines] == [1, 1]
        assert await c.metric(EARLY_DECODES) == 2
        assert await c.metric(ERRORS % reason) == 1
        assert await c.metric('kvferry_router_retries_total{reason="prefill_lost",role="decode"}') == 1
        # The router itself has ended the request: no trouble of the decode engine's is blamed.
        told = [record.getMessage() for record in caplog.records if "the decode request" in record.getMessage()]
        assert [words.rpartition(": ")[2] for words in told] == ["prefill_lost"]
        await c.until_idle()


@pytest.mark.parametrize(
    ("last", "reason", "blamed"),
    [
        # An error of its own may be about the request, and nobody else was asked.
        *((last, reason, not reason.startswith("status")) for last, reason in BAD_ENDS),
        (frame({"error": {"message": "bad grammar", "code": 400}}), "status_400", False),
        (frame({"error": {"message": "nobody waits", "code": "aborted"}}), "", False),
    ],
)
async def test_whose_fault_it_is_that_a_promise_is_not_kept(last, reason, blamed):
    prompt = Prompt(last)
    prompt.may_end.set()

    async def behave(request, seen):
        if seen.body.get("kv_transfer_params"):
            while (await prefill_of(c))["in_flight_requests"]:
                await asyncio.sleep(0)
        return await decoding(request, seen)

    p, d = early_engine("p0", prompt), decode_engine("d0", behave)
    async with cluster([p], [d], early_from_tokens=1) as c:
        for _ in range(INSTANCE_BREAKER.num_failures):
            assert (await c.complete(LONG)).status == 200
        assert (await prefill_of(c))["breaker"] == ("open" if blamed else "closed")
        assert ("kvferry_router_upstream_errors_total{" in await c.metrics()) == bool(reason)
        assert await c.metric(ERRORS % reason) == (INSTANCE_BREAKER.num_failures if reason else 0)


def test_a_request_whose_time_is_over_blames_nobody():
    judge = OutcomeRecorder(SimpleNamespace(), NO_COST, kind_of(REQUEST, NO_COST), streams=True)
    assert judge.hears_end(SimpleNamespace(), Failed(TOO_LATE, "x")) == ""


async def test_what_decode_has_lost_is_left_before_it_is_computed_anew():
    async def behave(request, seen):
        if len(p.seen) > 1:
            was_left.append(p.left.is_set())
        return await Prompt()(request, seen)

    was_left: list[bool] = []
    p, d = early_engine("p0", behave), decode_engine("d0", resetting)
    async with cluster([p], [d, decode_engine("d1")], early_from_tokens=1) as c:
        for _ in range(4):
            assert (await c.complete(LONG)).status == 200
        assert was_left
        assert all(was_left)
        await c.until_idle()


async def test_a_promise_and_its_failure_may_come_in_one_piece():
    behave = streaming(PROMISE + frame({"error": {"message": "x", "code": 500}}))
    async with cluster([early_engine("p0", behave)], [decode_engine("d0", hanging)], early_from_tokens=1) as c:
        asking = asyncio.create_task(c.complete(LONG))
        while not await c.metric(ERRORS % "status_500"):
            await asyncio.sleep(0)
        asking.cancel()
        await c.decode[0].left.wait()


async def test_who_has_computed_a_cache_that_has_come_has_done_well():
    """Its own answer is still on its way when decode's is over."""
    p, d = early_engine("p0", Prompt()), decode_engine()
    async with cluster([p], [d], early_from_tokens=1) as c:
        assert (await c.complete(LONG)).status == 200
        await p.left.wait()
        told = await prefill_of(c)
        assert told["prefill_tokens_per_s"] > 0
        assert told["in_flight_requests"] == 0


recomputing = streaming(ONE + DONE, **{"x-kvferry-cache": "recomputed", "x-kvferry-cache-reason": "x"})


@pytest.mark.parametrize(("answer", "tells"), [(decoding, True), (recomputing, False)])
async def test_the_handover_is_from_the_end_of_the_prefill_to_an_answer_made_of_its_cache(answer, tells):
    prompt = Prompt()
    prompt.may_end.set()

    async def behave(request, seen):
        while (await prefill_of(c))["in_flight_requests"]:
            await asyncio.sleep(0)
        return await answer(request, seen)

    async with cluster([early_engine("p0", prompt)], [decode_engine("d0", behave)], early_from_tokens=1) as c:
        async with c.session.post(c.url + "/v1/completions", json=LONG | {"stream": True}) as response:
            await response.read()
        assert (c.app.state.pool.handover.value > 0) is tells


async def test_who_has_not_computed_what_was_computed_again_has_shown_nothing():
    p, d = early_engine("p0", Prompt()), decode_engine("d0", recomputing)
    async with cluster([p], [d], early_from_tokens=1) as c:
        assert (await c.complete(LONG)).status == 200
        await p.left.wait()
        assert (await prefill_of(c))["prefill_tokens_per_s"] == 0


async def test_what_the_router_has_left_raises_no_doubts_about_it():
    p, doubts = early_engine("p0", Prompt()), []
    async with cluster([p], [decode_engine()], early_from_tokens=1) as c:
        c.app.state.pool.request_probe = doubts.append
        assert (await c.complete(LONG)).status == 200
        await p.left.wait()
        await c.until_idle()
        assert doubts == []


@pytest.mark.parametrize("cut", range(1, len(PROMISE)))
def test_the_first_event_is_found_wherever_it_is_cut(cut):
    pieces = [PROMISE[:cut], PROMISE[cut:], DONE, b""]

    async def piece():
        return pieces.pop(0)

    outgoing = HttpRequest("POST", "http://127.0.0.1:1", "/v1/completions", [], b"")
    upstream = UpstreamRequest(
        SimpleNamespace(), SimpleNamespace(), UpstreamTrace(), outgoing, Timeouts(1.0, 1.0), CHAT
    )
    assert asyncio.run(upstream._first_event(SimpleNamespace(piece=piece))) == PROMISE


async def test_requests_that_are_left_are_not_kept_in_memory():
    """Without a collector that looks for cycles."""

    def alive():
        return [
            sum(type(one) is kind for one in gc.get_objects())
            for kind in (EarlyPrefill, UpstreamRequest, dispatcher.Dispatcher)
        ]

    p, d = early_engine("p0", Prompt()), decode_engine()
    async with cluster([p], [d], early_from_tokens=1) as c:
        await c.complete(LONG)
        await c.until_idle()
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(5):
                p.left.clear()
                await c.complete(LONG)
                await p.left.wait()
            await c.until_idle()
            assert alive() == before
        finally:
            gc.enable()


def failing_with(code):
    async def behave(request, seen):
        return web.json_response({"error": {"message": "x", "type": "server_error", "code": code}}, status=502)

    return behave


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (streaming(ONE + DONE), "malformed"),
        (streaming(), "malformed"),
        (streaming(frame({"error": {"message": "x", "code": 503}})), "status_503"),
        (failing(500, "x"), "status_500"),
    ],
)
async def test_a_prefill_that_does_not_promise_has_failed(behave, reason):
    p, d = early_engine("p0", behave), decode_engine()
    async with cluster([p], [d], early_from_tokens=1) as c:
        reply = await c.complete(LONG)
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "decode-only")
        assert await c.metric(ERRORS % reason) == 1
        assert await c.metric(EARLY_DECODES) == 0


async def test_an_engine_that_answers_as_a_whole_is_understood():
    p, d = early_engine("p0", prefilling("p0")), decode_engine()
    async with cluster([p], [d], early_from_tokens=1) as c:
        reply = await c.complete(LONG)
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "disaggregated")
        assert d.seen[0].body["kv_transfer_params"]["remote_engine_id"] == "p0"


async def test_a_promise_may_come_in_pieces():
    async def behave(request, seen):
        response = await open_stream(request)
        for at in range(0, len(PROMISE), 20):
            await response.write(PROMISE[at : at + 20])
            await asyncio.sleep(0)
        await response.write(DONE)
        return response

    async with cluster([early_engine("p0", behave)], [decode_engine()], early_from_tokens=1) as c:
        assert (await c.complete(LONG)).headers["x-kvferry-path"] == "disaggregated"
        assert await c.metric(EARLY_DECODES) == 1


async def test_a_promise_is_not_waited_for_longer_than_a_prefill():
    p, d = early_engine("p0", Prompt()), decode_engine("d0", hanging)
    async with cluster([p], [d], early_from_tokens=1, prefill_timeout_s=2.0) as c:
        asking = asyncio.create_task(c.complete(LONG))
        await asyncio.gather(p.left.wait(), d.left.wait())
        while len(d.seen) < 2:
            await asyncio.sleep(0)
        assert await c.metric(ERRORS % "deadline") == 1
        assert "kv_transfer_params" not in d.seen[1].body
        asking.cancel()


async def test_decode_may_wait_for_the_prompt_as_well(monkeypatch):
    """Its own limit alone would be over before the prompt is computed."""
    given = record_limits(monkeypatch)
    prompt = Prompt()
    prompt.may_end.set()
    for behave in (prompt, prefilling("p0")):
        limits = {"prefill_timeout_s": 20.0, "decode_timeout_s": 7.0}
        async with cluster([early_engine("p0", behave)], [decode_engine()], early_from_tokens=1, **limits) as c:
            assert (await c.complete(LONG)).status == 200
    assert given == [20.0, 27.0, 20.0, 7.0]
