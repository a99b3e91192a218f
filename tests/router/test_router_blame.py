"""Whose fault a failed request is: a failure that follows the request from one instance to the next is nobody's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from aiohttp import web
from router_harness import cluster, decode_engine, decoding, failing, hanging, prefill_engine, prefilling, resetting
from sglang_stubs import Rooms, sglang_decode, sglang_prefill

from kvferry.router.answers.engine_response import known_reason
from kvferry.router.events import PREFILL_LOST, PREFILL_REFUSED, TOO_LATE, Answered, Ended, Failed, Opened
from kvferry.router.fleet.circuit_breaker import BreakerTable
from kvferry.router.fleet.instance import INSTANCE_BREAKER
from kvferry.router.fleet.instance_pool import KIND_BREAKER, MAX_KINDS, PAIR_BREAKER, InstancePool
from kvferry.router.flow.outcomes import FailureAttribution, OutcomeRecorder, UnattributedFailure
from kvferry.router.policy.records import Instance, RequestCost, Role
from kvferry.router.request.client_request import Endpoint, parse_request
from kvferry.router.request.request_kind import RequestKind, kind_of
from kvferry.router.telemetry.metrics import Metrics
from kvferry.router.upstream.failures import DEADLINE

MANY = 2 * (INSTANCE_BREAKER.num_failures + PAIR_BREAKER.num_failures + KIND_BREAKER.num_failures)
PLAIN = {"prompt": "a"}
TASK = RequestCost(model="tiny")
# Any field will do: engines of this file cannot fulfil a request that has it.
ODD = {"prompt": "a", "odd": True}
P0, P1 = (Instance(f"http://p{i}", Role.PREFILL) for i in range(2))
D0, D1 = (Instance(f"http://d{i}", Role.DECODE) for i in range(2))
FALLBACKS = 'kvferry_router_fallbacks_total{reason="%s"}'
UPSTREAM_ERRORS = 'kvferry_router_upstream_errors_total{reason="%s",role="prefill"}'


def odd_ones_fail(behave, failure=failing(500, "no tool call in this")):  # noqa: B008
    async def answer(request, seen):
        return await (failure if "odd" in seen.body else behave)(request, seen)

    return answer


def prefills(num, failure=failing(500, "no tool call in this")):  # noqa: B008
    return [prefill_engine(f"p{i}", odd_ones_fail(prefilling(f"p{i}"), failure)) for i in range(num)]


async def breakers(c) -> dict[str, str]:
    return {one["url"]: one["breaker"] for one in (await c.members())["members"]}


@pytest.mark.parametrize("num_prefills", [1, 2, 3])
async def test_requests_that_every_prefill_answers_with_5xx_take_nobody_out(num_prefills):
    async with cluster(prefills(num_prefills), [decode_engine()]) as c:
        for _ in range(MANY):
            reply = await c.complete(ODD)
            assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "decode-only")
        assert set((await breakers(c)).values()) == {"closed"}
        assert (await c.complete(PLAIN)).headers["x-kvferry-path"] == "disaggregated"


@pytest.mark.parametrize("num_prefills", [1, 2])
async def test_a_kind_that_keeps_failing_costs_no_prefill_requests_for_a_while(num_prefills):
    engines = prefills(num_prefills)
    async with cluster(engines, [decode_engine()]) as c:
        for _ in range(MANY):
            await c.complete(ODD)
        assert sum(len(engine.seen) for engine in engines) == num_prefills * KIND_BREAKER.num_failures
        reply = await c.complete(ODD)
        assert reply.headers["x-kvferry-reason"] == "prefill_keeps_failing"
        assert await c.metric(FALLBACKS % "prefill_failed") == KIND_BREAKER.num_failures


@pytest.mark.parametrize("num_prefills", [1, 2])
@pytest.mark.slow
async def test_requests_that_take_too_long_everywhere_take_nobody_out(num_prefills):
    """Nor do they wait for long each time: such requests have no prefill request for a while, others have one."""
    engines = prefills(num_prefills, hanging)
    async with cluster(engines, [decode_engine()], prefill_timeout_s=0.5) as c:
        for _ in range(MANY):
            reply = await c.complete(ODD)
            assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "decode-only")
        assert set((await breakers(c)).values()) == {"closed"}
        # Counted where they are sent: on a busy machine the time of some is over before an engine sees them.
        assert await c.metric(UPSTREAM_ERRORS % "deadline") == num_prefills * KIND_BREAKER.num_failures
        assert (await c.complete(PLAIN)).headers["x-kvferry-path"] == "disaggregated"


async def test_a_prefill_that_takes_too_long_where_another_one_does_not_is_taken_out():
    bad, good = prefill_engine("p0", hanging), prefill_engine("p1")
    async with cluster([bad, good], [decode_engine()], prefill_timeout_s=2.0) as c:
        replies = await asyncio.gather(*(c.complete(PLAIN) for _ in range(MANY)))
        assert {reply.headers["x-kvferry-path"] for reply in replies} == {"disaggregated"}
        assert (await breakers(c))[bad.url] == "open"


async def test_long_answers_take_no_decode_out():
    ds = [decode_engine(f"d{i}", odd_ones_fail(decoding, hanging)) for i in range(2)]
    async with cluster([], ds, decode_timeout_s=0.1) as c:
        replies = await asyncio.gather(*(c.complete(ODD) for _ in range(MANY)))
        assert {reply.status for reply in replies} == {504}
        assert set((await breakers(c)).values()) == {"closed"}


async def test_a_prefill_whose_cache_is_not_read_in_time_is_not_taken_out():
    """In a room it answers when decode has read its cache."""
    p, d = sglang_prefill(Rooms(), hanging), sglang_decode(Rooms(), hanging)
    async with cluster([p], [d], prefill_timeout_s=0.05, decode_timeout_s=0.05) as c:
        replies = await asyncio.gather(*(c.complete(PLAIN) for _ in range(MANY)))
        assert all(reply.status >= 500 for reply in replies)
        assert (await breakers(c))[p.url] == "closed"


@pytest.mark.parametrize(
    ("event", "reason", "blamed"),
    [
        (Failed(DEADLINE, "x"), DEADLINE, []),
        (Failed("reset", "x"), "reset", [P0]),
        (Failed(TOO_LATE, "x"), "", []),
        (Answered(400, b"{}"), PREFILL_REFUSED, []),
        (Answered(429, b"{}"), "status_429", []),
        (Answered(500, b"{}"), "status_500", [P0]),
        (Ended(), "", []),
    ],
)
def test_whose_fault_it_is_that_a_prefill_that_waits_fails_where_another_does_not(event, reason, blamed):
    failed, recorder = [], recorder_of(InstancePool([P0, P1], Metrics()))
    assert recorder.hears_end_of_reading(reservation_of(P0, failed), event) == reason
    recorder.hears_end_of_reading(reservation_of(P1, failed), Ended())
    recorder.end()
    assert failed == blamed


def recorder_of(pool: InstancePool) -> OutcomeRecorder:
    kind = kind_of(parse_request(json.dumps(PLAIN).encode(), Endpoint.COMPLETIONS), TASK)
    return OutcomeRecorder(pool, TASK, kind, streams=True)


def reservation_of(instance: Instance, failed: list[Instance]) -> SimpleNamespace:
    """Stands for one that is only told how it went; `failed` gets those whose fault it was."""
    told = dict.fromkeys(("computes", "answers", "suspected", "acquitted", "succeeded"), lambda: None)
    return SimpleNamespace(instance=instance, failed=lambda: failed.append(instance), is_on=lambda _: False, **told)


@pytest.mark.parametrize(
    ("reason", "blamed"), [("reset", [D0]), (PREFILL_LOST, []), (PREFILL_REFUSED, []), (TOO_LATE, [])]
)
def test_a_decode_that_was_left_for_another_reason_has_not_failed(reason, blamed):
    failed, recorder = [], recorder_of(InstancePool([P0, D0, D1], Metrics()))
    for decode, event in ((D0, Failed(reason, "x")), (D1, Opened(can_append=True))):
        recorder.chosen(P0, (decode,))
        recorder.sends(reservation_of(decode, failed), divided=True)
        recorder.hears(event, [], 0.0)
    recorder.end()
    assert failed == blamed


@pytest.mark.parametrize(
    ("failing_pairs", "serving", "lost"),
    [
        ([(P0, D0)], (P1, D0), [(P0, D0)]),
        ([(P0, D0)], (P0, D1), [(P0, D0)]),
        ([(P0, D0), (P0, D1)], (P1, D1), []),
    ],
)
def test_an_error_is_held_against_a_pair_unless_another_decode_has_it_as_well(
    monkeypatch, failing_pairs, serving, lost
):
    pool = InstancePool([P0, P1, D0, D1], Metrics())
    told, abandoned = [], []
    monkeypatch.setattr(pool, "lost", lambda pair, reason, trial: told.append(pair))
    monkeypatch.setattr(pool.pairs, "abandoned", lambda pair, trial: abandoned.append(pair))
    recorder = recorder_of(pool)
    for prefill, decode in (*failing_pairs, serving):
        recorder.chosen(prefill, (decode,))
        recorder.sends(reservation_of(decode, []), divided=True)
        has_failed = (prefill, decode) != serving
        recorder.hears(Answered(500, b"{}") if has_failed else Opened(can_append=True), [], 0.0)
    recorder.end()
    # Each is told once: a trial that has been left is over.
    assert told == lost
    assert abandoned == [*(pair for pair in failing_pairs if pair not in lost), serving]


@pytest.mark.parametrize("failure", [failing(500, "broken"), resetting])
async def test_a_failure_of_prefill_is_known_while_decode_still_answers(failure):
    """An instance on trial is not kept for the length of an answer."""
    let_go = asyncio.Event()

    async def slowly(request, seen):
        await let_go.wait()
        return await decoding(request, seen)

    prefill, decode = prefills(1, failure), decode_engine("d0", slowly)
    async with cluster(prefill, [decode]) as c:
        waiting = []
        for num in range(1, INSTANCE_BREAKER.num_failures + 2):
            waiting.append(asyncio.create_task(c.complete(ODD)))
            while len(decode.seen) < num:
                decode.arrived.clear()
                await decode.arrived.wait()
        assert len(prefill[0].seen) == INSTANCE_BREAKER.num_failures
        let_go.set()
        assert {one.status for one in await asyncio.gather(*waiting)} == {200}


async def test_a_request_that_breaks_every_connection_takes_no_prefill_out():
    async with cluster(prefills(2, resetting), [decode_engine()]) as c:
        for _ in range(MANY):
            assert (await c.complete(ODD)).status == 200
        assert set((await breakers(c)).values()) == {"closed"}


@pytest.mark.parametrize("behave", [failing(500, "broken"), resetting])
async def test_a_prefill_that_fails_where_another_one_does_not_is_taken_out(behave):
    bad, good = prefill_engine("p0", behave), prefill_engine("p1")
    async with cluster([bad, good], [decode_engine()]) as c:
        for _ in range(MANY):
            assert (await c.complete(PLAIN)).headers["x-kvferry-path"] == "disaggregated"
        assert await breakers(c) == {bad.url: "open", good.url: "closed", c.decode[0].url: "closed"}
        assert len(bad.seen) == INSTANCE_BREAKER.num_failures


@pytest.mark.parametrize("prefill", [[], ["p0", "p1"]], ids=["alone", "pairs"])
async def test_requests_that_every_decode_answers_with_5xx_take_nobody_out(prefill):
    """Neither the decode instances nor the pairs: a cache that came may be answered with 5xx, too."""
    ds = [decode_engine(f"d{i}", odd_ones_fail(decoding)) for i in range(2)]
    async with cluster([prefill_engine(name) for name in prefill], ds) as c:
        for _ in range(MANY):
            assert (await c.complete(ODD)).status == 500
        assert set((await breakers(c)).values()) == {"closed"}
        assert (await c.members())["broken_pairs"] == []
        path = "disaggregated" if prefill else "decode-only"
        assert (await c.complete(PLAIN)).headers["x-kvferry-path"] == path


async def test_a_forced_tool_call_is_another_kind_than_one_that_is_free():
    async def behave(request, seen):
        forced = seen.body.get("tool_choice") == "required"
        return await (failing(500, "cut off") if forced else prefilling("p0"))(request, seen)

    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "auto"}

    async def path(body) -> str:
        async with c.session.post(c.url + "/v1/chat/completions", json=body) as response:
            await response.read()
            return response.headers["x-kvferry-path"]

    async with cluster([prefill_engine("p0", behave)], [decode_engine()]) as c:
        assert {await path(chat | {"tool_choice": "required"}) for _ in range(MANY)} == {"decode-only"}
        assert await path(chat) == "disaggregated"


def test_a_failing_adapter_or_image_is_another_kind_than_text():
    def chat(content: object, **more: object):
        return parse_request(
            json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode(), Endpoint.CHAT
        )

    image = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    kinds = [
        kind_of(chat("a"), TASK),
        kind_of(chat("a"), replace(TASK, model="adapter")),
        kind_of(chat(image), TASK),
        kind_of(chat("a", stream=True), TASK),
        kind_of(chat("a", tool_choice="required"), TASK),
        kind_of(chat("a"), replace(TASK, prompt_tokens=100_000)),
    ]
    assert len({kind.digest for kind in kinds}) == len(kinds)
    # What is quoted in a text is no part of a message.
    assert kind_of(chat(json.dumps(image)), TASK) == kinds[0]
    named = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    assert kind_of(chat("a", tool_choice=named[0]), TASK) == kind_of(chat("a", tool_choice=named[1]), TASK)


def test_a_log_names_no_field_of_a_clients_own_making():
    odd = {"prompt": "a", "x\nWARNING all is lost": 1, "y" * 10_000: 2}
    assert kind_of(parse_request(json.dumps(odd).encode(), Endpoint.COMPLETIONS), TASK).words == "prompt"


def test_an_engines_word_is_a_label_only_where_it_is_known():
    assert [known_reason(word) for word in ("expired", "prompt_logprobs", "made up", "")] == [
        *("expired", "prompt_logprobs"),
        *("unknown", "unknown"),
    ]


def test_a_kind_is_tried_again_after_a_while_and_forgotten_when_it_goes_well():
    kinds, kind = (
        BreakerTable(KIND_BREAKER, MAX_KINDS),
        kind_of(parse_request(json.dumps(ODD).encode(), Endpoint.COMPLETIONS), TASK),
    )
    news = [kinds.failed(kind, 0.0) for _ in range(KIND_BREAKER.num_failures + 1)]
    assert news == [False] * (KIND_BREAKER.num_failures - 1) + [True, False]
    assert not kinds.may_begin(kind, 0.0)
    assert kinds.may_begin(kind, KIND_BREAKER.open_s)
    trial = kinds.begin(kind, KIND_BREAKER.open_s)
    assert not kinds.may_begin(kind, KIND_BREAKER.open_s)
    kinds.abandoned(kind, trial)
    assert kinds.may_begin(kind, KIND_BREAKER.open_s)
    kinds.succeeded(kind)
    assert len(kinds) == 0


def test_clients_cannot_make_it_remember_without_end():
    kinds = BreakerTable(KIND_BREAKER, MAX_KINDS)
    for i in range(MAX_KINDS + 5):
        kinds.failed(RequestKind(str(i).encode(), ""), 0.0)
    assert len(kinds) == MAX_KINDS


def blamed_of(*steps) -> list[Instance]:
    """Steps are instances that fail, or a role that is served; `None` ends the request. All are judged in the end."""
    suspects, blamed, acquitted = FailureAttribution(), [], []
    for step in steps:
        match step:
            case None:
                for role in Role:
                    suspects.end(role)
            case Role():
                suspects.served(step)
            case instance, is_certain:
                blame, acquit = (partial(judged.append, instance) for judged in (blamed, acquitted))
                suspects.add(instance.role, UnattributedFailure(instance, blame, acquit, is_certain))
    assert len(blamed) + len(acquitted) == sum(isinstance(step, tuple) for step in steps)
    return blamed


@pytest.mark.parametrize(
    ("steps", "blamed"),
    [
        (((P0, False), Role.PREFILL, None), [P0]),
        (((P0, False), None), []),
        (((P0, True), None), [P0]),
        (((P0, True), (P1, True), None), []),
        (((P0, False), (P1, True), (P0, True), Role.PREFILL, None), []),
        (((P0, False), (P0, False), Role.PREFILL, None), [P0, P0]),
        (((P0, False), Role.DECODE, None), []),
    ],
)
def test_who_is_blamed(steps, blamed):
    assert blamed_of(*steps) == blamed


async def test_an_overloaded_prefill_is_no_kind():
    async def behave(request, seen):
        return web.json_response({"error": {"message": "full", "code": 429}}, status=429)

    async with cluster([prefill_engine("p0", behave)], [decode_engine()]) as c:
        assert [(await c.complete(PLAIN)).status for _ in range(MANY)] == [429] * MANY
