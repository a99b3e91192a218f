"""Prefill and decode requests that meet in a room, as SGLang's do: playbooks, and the router on real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import random
from types import SimpleNamespace

import pytest
from aiohttp import web
from router_harness import (
    DONE,
    ONE,
    STREAM,
    Cluster,
    Engine,
    answer,
    cluster,
    decode_engine,
    failing,
    frame,
    hanging,
    open_stream,
    prefill_engine,
    record_limits,
    resetting,
    streaming,
)
from sglang_stubs import NO_ROOM, USAGE, Rooms, room_fields, sglang_decode, sglang_engine, sglang_prefill
from test_router_flow import D0, D1, P0, P1, RAW, REQUEST, failed, fallback, pick, pick_alone, play, retry

from kvferry.kv_transfer_params import MAX_ROOM
from kvferry.router.answers.answer_format import CHAT
from kvferry.router.answers.refusals import pair_failed
from kvferry.router.commands import Cancel, Count, Counted, Forward, Pick, Refuse, Relay, Send, Start
from kvferry.router.config import PrefillFallback
from kvferry.router.events import (
    NOT_WANTED,
    PREFILL_GONE,
    PREFILL_LOST,
    PREFILL_REFUSED,
    TOO_LATE,
    Answered,
    Began,
    ClientGone,
    Ended,
    Failed,
    Opened,
    Path,
    Picked,
    Room,
)
from kvferry.router.fleet.engine_info import UNKNOWN_ENGINE, EngineInfo, Handover, differences
from kvferry.router.fleet.instance import OpenRequests, Origin
from kvferry.router.fleet.instance_pool import PAIR_BREAKER, InstancePool
from kvferry.router.fleet.rooms import room_between
from kvferry.router.fleet.sglang_info import sglang_info
from kvferry.router.flow.attempts import MAX_GONE
from kvferry.router.flow.state_machine import Flow, State
from kvferry.router.flow.upstream_request import Timeouts, UpstreamRequest
from kvferry.router.policy.prefill_threshold import skip
from kvferry.router.policy.records import (
    Instance,
    Limits,
    Load,
    NoInstance,
    Overloaded,
    RequestCost,
    Role,
    RoutingQuery,
    SkipPrefill,
)
from kvferry.router.request.client_request import (
    Endpoint,
    parse_request,
    prefill_body,
    room_decode_body,
    room_prefill_body,
)
from kvferry.router.telemetry.metrics import Metrics
from kvferry.router.telemetry.tracing import UpstreamTrace
from kvferry.router.upstream.failures import MESSAGES
from kvferry.router.upstream.http_client import HttpRequest

FIELDS, OTHER_FIELDS = (b'{"bootstrap_host":"p","bootstrap_port":1,"bootstrap_room":%d}' % number for number in (7, 8))
ROOM, OTHER_ROOM = Room(FIELDS, FIELDS), Room(OTHER_FIELDS, OTHER_FIELDS)
BEGUN = [Start(P0, room_prefill_body(REQUEST, FIELDS)), Send(D0, room_decode_body(REQUEST, FIELDS))]
AGAIN = [Start(P1, room_prefill_body(REQUEST, OTHER_FIELDS)), Send(D0, room_decode_body(REQUEST, OTHER_FIELDS))]
D_ERROR = Answered(500, b'{"message": "Decode transfer failed", "code": 500}')
LOST, REFUSED = Failed(PREFILL_LOST, "x"), Failed(PREFILL_REFUSED, "x")


def decode(instance: Instance = D0) -> Picked:
    """A decode instance that computes no prompt."""
    return Picked(instance, computes=False)


def to_room():
    return (
        (Began(), [pick(Role.DECODE)]),
        (decode(), [pick(Role.PREFILL)]),
        (Picked(P0, room=ROOM), BEGUN),
    )


def fields_of(room: Room) -> list[dict]:
    """Of SGLang's two requests: nothing of them is kept elsewhere."""
    assert room.kept == b""
    return [json.loads(fields) for fields in (room.prefill, room.decode)]


def refused(reason: str) -> Count:
    return Count(Counted.REFUSED, Role.PREFILL, reason)


def last_words(flow: Flow, *steps) -> tuple[int, str, str]:
    """Status, code and reason of the refusal that the last event leads to."""
    play(flow, *steps[:-1])
    refusal = flow.handle(steps[-1])[-1]
    assert isinstance(refusal, Refuse)
    assert flow.state is State.DONE
    error = refusal.body["error"]
    return refusal.status, error["code"], error["reason"]


# --- what is asked


def test_decode_gets_the_clients_own_bytes_and_the_room():
    assert room_decode_body(REQUEST, FIELDS) == RAW[:-1] + b"," + FIELDS[1:]


def test_prefill_is_asked_for_the_token_that_the_client_will_get():
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 50,
        "min_tokens": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "regex": "a+",
        "ignore_eos": True,
        "temperature": 0.5,
    }
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "routed_dp_rank": 1}
    request = parse_request(json.dumps(streamed).encode(), Endpoint.CHAT)
    assert json.loads(room_prefill_body(request, FIELDS)) == {**body, "stream": False, **json.loads(FIELDS)}


def test_a_room_is_where_the_prefill_instance_says_or_at_the_host_of_its_url():
    info, decodes = EngineInfo(handover=Handover.ROOM, bootstrap_port=8998), EngineInfo(handover=Handover.ROOM)
    room = room_fields("10.0.0.5", 8998, MAX_ROOM)
    prefill = Instance("http://10.0.0.5:30000", Role.PREFILL)
    assert fields_of(room_between(prefill, info, decodes, MAX_ROOM)) == [room, room]
    info = EngineInfo(handover=Handover.ROOM, bootstrap_host="10.1.0.5", bootstrap_port=8998)
    room["bootstrap_host"] = "10.1.0.5"
    assert fields_of(room_between(prefill, info, decodes, MAX_ROOM)) == [room, room]
    assert room_between(P0, UNKNOWN_ENGINE, UNKNOWN_ENGINE, 1) is None


# --- playbooks


def test_both_requests_begin_at_once():
    flow = Flow(REQUEST)
    play(flow, *to_room(), (Opened(True), [Relay()]), (Ended(), []))
    assert flow.path is Path.DISAGGREGATED


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (ClientGone(), [Cancel()]),
        (Answered(400, b"{}"), [Forward()]),
        (REFUSED, [Forward()]),
        (Failed("reset", "x"), [failed(Role.DECODE, "reset"), pick(Role.DECODE, D0)]),
        (LOST, [failed(Role.DECODE, PREFILL_LOST), pick(Role.DECODE, P0)]),
        (D_ERROR, [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0)]),
    ],
)
def test_how_a_decode_request_in_a_room_ends(event, commands):
    play(Flow(REQUEST), *to_room(), (event, commands))


def test_a_lost_prefill_is_tried_on_another_instance_in_another_room():
    play(
        Flow(REQUEST),
        *to_room(),
        (LOST, [failed(Role.DECODE, PREFILL_LOST), pick(Role.DECODE, P0)]),
        (decode(), [retry(Role.DECODE, PREFILL_LOST), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=OTHER_ROOM), AGAIN),
        (Opened(True), [Relay()]),
        (Ended(), []),
    )


def test_a_prefill_that_was_busy_is_forgotten_when_another_one_has_met_decode():
    """It was asked by itself. Decode's own error is not told where decode alone would answer."""
    flow = Flow(REQUEST)
    play(
        flow,
        (Began(), [pick(Role.DECODE)]),
        (Picked(D0), [pick(Role.PREFILL)]),
        (Picked(P0), [Send(P0, prefill_body(REQUEST))]),
        (Answered(429, b"{}"), [failed(Role.PREFILL, "status_429"), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=OTHER_ROOM), [retry(Role.PREFILL, "status_429"), *AGAIN]),
        (D_ERROR, [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0, P1)]),
        (NoInstance(), [pick(Role.DECODE, P0, P1)]),
        (Picked(D0), [retry(Role.DECODE, "status_500"), pick(Role.PREFILL, P0, P1)]),
        (NoInstance(), [fallback("pair_failed"), Send(D0, RAW)]),
    )


def test_the_only_prefill_instance_is_tried_again_where_decode_cannot_do_without():
    """It was an error: it may have been decode's."""
    flow = Flow(REQUEST)
    again = [Start(P0, room_prefill_body(REQUEST, OTHER_FIELDS)), AGAIN[1]]
    play(
        flow,
        *to_room(),
        (D_ERROR, [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0)]),
        (NoInstance(), [pick(Role.DECODE, P0)]),
        (decode(), [retry(Role.DECODE, "status_500"), pick(Role.PREFILL, P0)]),
        (NoInstance(), [pick(Role.PREFILL)]),
        (Picked(P0, room=OTHER_ROOM), again),
        (D_ERROR, [failed(Role.DECODE, "status_500"), pair_failed(500)]),
    )


def test_a_prefill_that_is_lost_twice_is_told_to_the_client():
    flow = Flow(REQUEST)
    steps = (
        *to_room(),
        (LOST, [failed(Role.DECODE, PREFILL_LOST), pick(Role.DECODE, P0)]),
        (decode(), [retry(Role.DECODE, PREFILL_LOST), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=OTHER_ROOM), AGAIN),
        (LOST, [failed(Role.DECODE, PREFILL_LOST), pick_alone(P0, P1)]),
        decode(),
    )
    assert last_words(flow, *steps) == (502, "prefill_failed", PREFILL_LOST)


def test_prefill_instances_at_which_nobody_is_do_not_use_up_the_second_try():
    """Of the two that were to meet: what is lost for another reason after that is tried once more."""
    gone, lost = Failed(PREFILL_GONE, "x"), failed(Role.DECODE, PREFILL_GONE)
    instances = [P0, *(Instance(f"http://lost{number}", Role.PREFILL) for number in range(MAX_GONE)), P1]
    flow = Flow(REQUEST)
    play(flow, *to_room())
    for number, prefill in enumerate(instances[1:], 1):
        reason, event = (PREFILL_GONE, gone) if number <= MAX_GONE else (PREFILL_LOST, LOST)
        before = frozenset(instances[:number])
        play(
            flow,
            (event, [failed(Role.DECODE, reason), pick(Role.DECODE, *before)]),
            (decode(), [retry(Role.DECODE, reason), pick(Role.PREFILL, *before)]),
            (Picked(prefill, room=OTHER_ROOM), [Start(prefill, AGAIN[0].body), AGAIN[1]]),
        )
    assert last_words(flow, (gone, [lost, pick_alone(*instances)]), decode()) == (502, "prefill_failed", PREFILL_GONE)


def test_without_prefill_another_decode_computes():
    flow = Flow(REQUEST)
    play(
        flow,
        *to_room()[:2],
        (NoInstance(), [pick_alone()]),
        (Picked(D1), [fallback("no_prefill_instance"), Send(D1, RAW)]),
        (Opened(True), [Relay()]),
    )
    assert flow.path is Path.DECODE_ONLY


@pytest.mark.parametrize(
    ("event", "reason"),
    [(NoInstance(), "no_prefill_instance"), (SkipPrefill("short_prompt", "tokens=3"), "short_prompt")],
)
def test_where_no_decode_instance_computes_the_client_is_told_why(event, reason):
    """Whatever a policy says."""
    flow = Flow(REQUEST)
    play(flow, *to_room()[:2], (event, [pick_alone()]))
    count, refusal = flow.handle(decode())
    assert count == refused(reason)
    assert (refusal.status, refusal.retry_after_s > 0) == (503, True)
    assert (refusal.body["error"]["code"], refusal.body["error"]["reason"]) == ("prefill_unavailable", reason)
    assert flow.path is Path.DISAGGREGATED


def test_what_cannot_be_divided_needs_a_decode_instance_that_computes():
    raw = b'{"prompt": "a", "n": 2}'
    flow = Flow(parse_request(raw, Endpoint.COMPLETIONS))
    play(flow, (Began(), [pick_alone()]), (Picked(D1), [fallback("several_sequences"), Send(D1, raw)]))
    flow = Flow(parse_request(raw, Endpoint.COMPLETIONS))
    steps = ((Began(), [pick_alone()]), decode())
    assert last_words(flow, *steps) == (400, "cannot_be_divided", "several_sequences")


def test_a_request_that_has_no_more_time_is_not_tried_again():
    flow = Flow(REQUEST)
    assert last_words(flow, *to_room(), Failed(TOO_LATE, "x")) == (504, "deadline_exceeded", TOO_LATE)


def answers_to(commands: list, rng: random.Random) -> list:
    """Some of the events that the last of these commands can be answered by."""
    instances = [P0, P1] if isinstance(commands[-1], Pick) and commands[-1].role is Role.PREFILL else [D0, D1]
    match commands[-1]:
        case Pick(role, excluded):
            left = [one for one in instances if one not in excluded]
            skips = [SkipPrefill("short_prompt")] if role is Role.PREFILL else []
            room = ROOM if role is Role.PREFILL else None
            picks = [Picked(one, room=room, computes=one is D1) for one in left]
            return [*picks, NoInstance(), Overloaded("ttft", 1), *skips]
        case Send():
            of_prefill = (PREFILL_LOST, PREFILL_GONE, PREFILL_REFUSED) if isinstance(commands[-2:][0], Start) else ()
            broken = [Failed(reason, "x") for reason in ("reset", "refused", "deadline", TOO_LATE, *of_prefill)]
            return [Opened(rng.random() < 0.5), Answered(400, b"{}"), D_ERROR, ClientGone(), *broken]
        case Relay():
            return [Ended(), Failed("reset", "x"), ClientGone()]
        case _:
            return []


@pytest.mark.parametrize("fallback", PrefillFallback)
@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_a_decode_that_computes_nothing_is_never_asked_alone(seed, fallback):
    rng = random.Random(seed)
    raw = RAW if seed % 3 else b'{"prompt": "a", "n": 2}'
    flow, begun, gone, event = Flow(parse_request(raw, Endpoint.COMPLETIONS), fallback), 0, 0, Began()
    for _ in range(80):
        commands = flow.handle(event)
        assert Send(D0, raw) not in commands
        if starts := [command for command in commands if isinstance(command, Start)]:
            begun += 1
            assert [command.body[-len(FIELDS) + 1 :] for command in (*starts, commands[-1])] == [FIELDS[1:]] * 2
        if flow.state is State.DONE:
            break
        event = rng.choice(answers_to(commands, rng))
        gone += isinstance(event, Failed) and event.reason in ("refused", PREFILL_GONE)
    assert flow.state is State.DONE
    assert begun <= 2 + gone


# --- who is paired


SGLANG = json.dumps(
    {
        "version": "0.5.23",
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "kvferry",
        "disaggregation_bootstrap_port": 8998,
    }
).encode()


def told(mode: str, role: Role, **more: object) -> EngineInfo:
    return sglang_info(json.dumps({**json.loads(SGLANG), "disaggregation_mode": mode, **more}).encode(), role, ("m",))


DECODE_INFO = told("decode", Role.DECODE)


def test_what_a_server_says_of_itself():
    info = sglang_info(SGLANG, Role.PREFILL, ("m",))
    assert (info.engine, info.version, info.models) == ("sglang", "0.5.23", ("m",))
    assert (info.handover, info.bootstrap_port, info.computes_prompts) == (Handover.ROOM, 8998, False)
    whole = told("null", Role.DECODE)
    assert (whole.handover, whole.computes_prompts) == (Handover.NONE, True)
    ours = told("prefill", Role.PREFILL, kvferry={"host": "10.1.0.5", "wire_version": "8", "cache": "abc"})
    assert (ours.bootstrap_host, ours.wire_version, ours.cache) == ("10.1.0.5", "8", "abc")
    assert (info.bootstrap_host, info.wire_version, info.cache) == ("", "", "")


@pytest.mark.parametrize("answer", [b"", b"[]", b"no json", b'{"disaggregation_bootstrap_port": "x"}'])
def test_a_server_that_cannot_be_understood_is_one_that_says_nothing(answer):
    for role in Role:
        assert sglang_info(answer, role, ("m",)) == EngineInfo(
            "sglang", models=("m",), handover=Handover.NONE, computes_prompts=role is Role.PREFILL
        )


def test_only_pairs_of_one_way_are_pairs():
    prefill, decode = told("prefill", Role.PREFILL), told("decode", Role.DECODE)
    assert differences(prefill, decode) == ()
    others = [
        UNKNOWN_ENGINE,
        EngineInfo("vllm", "0.32", models=("m",)),
        EngineInfo("kvferry", wire_version="8"),
        told("null", Role.DECODE),
        told("prefill", Role.DECODE),
        told("decode", Role.DECODE, disaggregation_transfer_backend="nixl"),
    ]
    assert all(differences(prefill, other) for other in others)
    ours = [told(role, role, version=role, kvferry={"wire_version": "8"}) for role in Role]
    later = told("decode", Role.DECODE, kvferry={"wire_version": "9"})
    assert differences(*ours) == ()
    assert differences(ours[0], later)
    assert all(differences(other, decode) for other in others[:3])
    assert differences(told("null", Role.PREFILL), told("null", Role.DECODE))


@pytest.mark.parametrize("joins", [Role.PREFILL, Role.DECODE])
def test_a_server_that_says_nothing_of_itself_is_in_no_pair_with_sglangs(joins):
    pool = InstancePool([D0 if joins is Role.PREFILL else P0], Metrics())
    pool.introduce(pool.instances[0], told("prefill", Role.PREFILL) if joins is Role.DECODE else DECODE_INFO)
    pool.add(P0 if joins is Role.PREFILL else D0, Origin.FILE)
    assert set(pool.incompatible()) == {(P0, D0)}


def test_a_prompt_is_not_left_to_a_decode_instance_that_computes_none():
    def query(computes: bool) -> RoutingQuery:
        load = Load(D0, True, 0, 0, computes_prompts=computes)
        return RoutingQuery(Role.PREFILL, RequestCost(prompt_tokens=3), (), (load,), Limits(skip_below_tokens=9))

    assert skip(query(True)) is not None
    assert skip(query(False)) is None


# --- on sockets


def rooms_of(engine: Engine) -> list[int]:
    """Of a server of SGLang."""
    return [seen.body["bootstrap_room"] for seen in engine.seen]


async def expect_another_prefill(c: Cluster) -> None:
    """The first prefill instance fails a request, and the second one serves it in another room."""
    (bad, good), (d,) = c.prefill, c.decode
    assert (await c.complete()).status == 200
    assert len(set(rooms_of(d))) == len(d.seen) == 2
    assert (len(bad.seen), len(good.seen)) == (1, 1)
    assert await c.metric('kvferry_router_retries_total{reason="prefill_lost",role="decode"}') == 1
    await c.until_idle()


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(3, 0), (0, 3)])
async def test_servers_that_have_just_died_are_passed_over_until_two_meet(num_prefill, num_decode):
    rooms = Rooms()
    prefill, decode = ([make(rooms) for _ in range(4)] for make in (sglang_prefill, sglang_decode))
    async with cluster(prefill, decode) as c:
        await asyncio.gather(*(engine.stop() for engine in (*prefill[:num_prefill], *decode[:num_decode])))
        reply = await c.complete()
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "disaggregated")
        await c.until_idle()


async def test_a_request_is_served_by_two_servers_that_meet():
    rooms = Rooms()
    p, d = sglang_prefill(rooms, port=8765), sglang_decode(rooms)
    async with cluster([p], [d]) as c:
        reply = await c.complete({"model": "tiny", "prompt": "hello", "max_tokens": 9, "rid": "still-known"})
        assert (reply.status, json.loads(reply.raw)["choices"][0]["text"]) == (200, "one two")
        assert reply.headers["x-kvferry-path"] == "disaggregated"
        await c.until_idle()
        ((asked,), (served,)) = p.seen, d.seen
        assert (asked.body["bootstrap_host"], asked.body["bootstrap_port"]) == ("127.0.0.1", 8765)
        assert 0 < asked.body["bootstrap_room"] <= MAX_ROOM
        assert asked.body == {**served.body, "stream": False}
        assert served.body["rid"] is None
        assert {one["handover"] for one in (await c.members())["members"]} == {"room"}
        assert "kvferry_router_upstream_errors_total{" not in await c.metrics()
        assert await c.metric("kvferry_router_early_decodes_total") == 0


async def test_a_stream_passes_and_says_what_prefill_had_cached():
    rooms = Rooms()

    async def behave(request, seen):
        await rooms.of(seen).computed.wait()
        rooms.of(seen).read.set()
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
        return await streaming(ONE + frame({"choices": [], "usage": usage}), DONE)(request, seen)

    async with cluster([sglang_prefill(rooms)], [sglang_decode(rooms, behave)]) as c:
        events = (await c.complete(STREAM)).raw.split(b"\n\n")
        usage = json.loads(events[1].removeprefix(b"data: "))["usage"]
        assert usage["prompt_tokens_details"] == USAGE["prompt_tokens_details"]
        assert events[2] == b"data: [DONE]"


async def test_what_prefill_had_cached_is_what_the_last_one_had():
    rooms = Rooms()
    usage = {"prompt_tokens": 9, "completion_tokens": 2}

    async def prefilling(request, seen):
        if len(p.seen) > 1:
            return await rooms.prefilling()(request, seen)
        return web.json_response(answer("one", usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 7}}))

    async def decoding(request, seen):
        if len(d.seen) == 1:
            while (await c.members())["members"][0]["in_flight_requests"]:
                await asyncio.sleep(0)
            return await failing(500, "Decode transfer failed")(request, seen)
        await rooms.of(seen).computed.wait()
        response = await open_stream(request)
        await response.write(ONE)
        rooms.of(seen).read.set()
        await response.write(frame({"choices": [], "usage": usage}) + DONE)
        return response

    p, d = sglang_prefill(rooms, prefilling), sglang_decode(rooms, decoding)
    async with cluster([p], [d]) as c:
        events = (await c.complete(STREAM)).raw.split(b"\n\n")
        told = json.loads(events[1].removeprefix(b"data: "))["usage"]
        assert told["prompt_tokens_details"] == USAGE["prompt_tokens_details"]


async def test_an_answer_that_comes_before_the_end_of_its_prefill_tells_nothing_of_the_handover():
    rooms = Rooms()

    async def behave(request, seen):
        rooms.of(seen).computed.set()
        return await hanging(request, seen)

    async with cluster([sglang_prefill(rooms, behave)], [sglang_decode(rooms)]) as c:
        assert (await c.complete(STREAM)).status == 200
        assert c.app.state.pool.handover.value == 0


async def test_every_request_has_a_room_of_its_own():
    rooms = Rooms()
    ps, ds = [sglang_prefill(rooms, port=8000 + i) for i in range(2)], [sglang_decode(rooms) for _ in range(2)]
    async with cluster(ps, ds) as c:
        replies = await asyncio.gather(*(c.complete() for _ in range(16)))
        assert [reply.status for reply in replies] == [200] * 16
        assert len({room for p in ps for room in rooms_of(p)}) == 16
        assert len(rooms.meetings) == 16


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
async def test_a_room_that_a_client_names_is_refused(name):
    rooms = Rooms()
    async with cluster([p := sglang_prefill(rooms)], [sglang_decode(rooms)]) as c:
        reply = await c.complete({"prompt": "a", name: 1})
        assert (reply.status, reply.error["param"]) == (400, name)
        headers = {f"x-override-{name.replace('_', '-')}": "1"}
        assert (await c.complete(headers=headers)).status == 200
        assert not headers.keys() & {header.lower() for header in p.seen[0].headers}


async def test_each_of_two_that_meet_has_the_time_of_both(monkeypatch):
    """A prefill answers when its cache has been read: a decode that waits for pages takes as long as it may."""
    given = record_limits(monkeypatch)
    rooms = Rooms()
    limits = {"prefill_timeout_s": 20.0, "decode_timeout_s": 7.0}
    async with cluster([sglang_prefill(rooms)], [sglang_decode(rooms)], **limits) as c:
        assert (await c.complete()).status == 200
    assert given == [27.0, 27.0]


@pytest.mark.parametrize("waiting", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_both(waiting):
    rooms = Rooms()
    p, d = sglang_prefill(rooms), sglang_decode(rooms)
    if waiting == "prefill":
        p.behave = hanging
    else:
        d.behave = hanging
    async with cluster([p], [d]) as c:
        await c.leave()


async def test_the_time_of_a_request_ends_both():
    rooms = Rooms()
    p, d = sglang_prefill(rooms), sglang_decode(rooms, hanging)
    async with cluster([p], [d]) as c:
        reply = await c.complete(headers={"x-kvferry-timeout": "2"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await asyncio.gather(p.left.wait(), d.left.wait())
        assert all(one["breaker"] == "closed" for one in (await c.members())["members"])


@pytest.mark.parametrize(("behave", "reason"), [(failing(500, "x"), "status_500"), (resetting, "reset")])
async def test_a_prefill_that_fails_is_replaced_at_once(behave, reason):
    """Decode would wait for its cache for as long as its own limits are."""
    rooms = Rooms()
    bad, good, d = sglang_prefill(rooms, behave), sglang_prefill(rooms, port=9000), sglang_decode(rooms)
    async with cluster([bad, good], [d]) as c:
        await expect_another_prefill(c)
        assert await c.metric(f'kvferry_router_upstream_errors_total{{reason="{reason}",role="prefill"}}') == 1


async def test_an_error_of_prefill_is_held_against_the_pair():
    """It may be decode's fault that its cache was not read."""
    rooms = Rooms()
    bad, good = sglang_prefill(rooms, failing(500, "x")), sglang_prefill(rooms, port=9000)
    d = sglang_decode(rooms)
    async with cluster([bad, good], [d]) as c:
        while len(bad.seen) < PAIR_BREAKER.num_failures:
            assert (await c.complete()).status == 200
        members = await c.members()
        assert members["broken_pairs"] == [{"prefill": bad.url, "decode": d.url, "breaker": "open"}]
        assert {one["breaker"] for one in members["members"]} == {"closed"}


async def test_a_request_that_is_left_before_it_has_begun_is_not_sent():
    closed = UpstreamRequest(
        SimpleNamespace(pool=SimpleNamespace(open_requests=OpenRequests())),
        SimpleNamespace(instance=P0),
        UpstreamTrace(),
        HttpRequest("POST", P0.url, "/v1/completions", [], b"{}"),
        Timeouts(1.0, math.inf),
        CHAT,
    )
    closed.close()
    assert await closed.run() == Failed(NOT_WANTED, MESSAGES[NOT_WANTED])


async def test_a_decode_that_fails_is_replaced_in_another_room_and_its_prefill_ended():
    rooms = Rooms()
    p, bad, good = sglang_prefill(rooms), sglang_decode(rooms, resetting), sglang_decode(rooms)
    async with cluster([p], [bad, good]) as c:
        assert (await c.complete()).status == 200
        await p.left.wait()
        assert len(set(rooms_of(p))) == len(p.seen) == 2


async def test_one_pair_that_fails_once_serves_the_second_try():
    rooms = Rooms()
    whole = rooms.decoding()

    async def behave(request, seen):
        return await (failing(500, "Decode transfer failed") if len(d.seen) == 1 else whole)(request, seen)

    d = sglang_decode(rooms, behave)
    async with cluster([p := sglang_prefill(rooms)], [d]) as c:
        assert (await c.complete()).status == 200
        assert len(set(rooms_of(p))) == 2


async def test_one_pair_that_keeps_failing_is_told_without_the_engines_words():
    rooms = Rooms()
    d = sglang_decode(rooms, failing(500, "nobody at tcp://10.0.0.5:8998 has said who it is"))
    async with cluster([sglang_prefill(rooms)], [d]) as c:
        reply = await c.complete()
        assert (reply.status, reply.error["code"], reply.error["reason"]) == (500, "pair_failed", "status_500")
        assert b"10.0.0.5" not in reply.raw
        assert len(d.seen) == 2


async def test_a_prefill_that_refuses_is_heard():
    """Decode has its cache from nobody, and would wait."""
    rooms = Rooms()
    d = sglang_decode(rooms)
    async with cluster([sglang_prefill(rooms, failing(400, "the prompt is too long"))], [d]) as c:
        reply = await c.complete()
        assert (reply.status, reply.error["message"]) == (400, "the prompt is too long")
        await d.left.wait()
        assert len(d.seen) == 1


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": "a", "n": 2}])
async def test_without_prefill_an_engine_that_computes_is_found_among_others(body):
    rooms = Rooms()
    d, whole = sglang_decode(rooms), decode_engine()
    async with cluster([], [d, whole]) as c:
        replies = [await c.complete(body) for _ in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert {reply.headers["x-kvferry-path"] for reply in replies} == {"decode-only"}
        assert (len(d.seen), len(whole.seen)) == (0, 4)


async def test_without_prefill_and_without_an_engine_that_computes_nothing_is_sent():
    d = sglang_decode(Rooms())
    async with cluster([], [d]) as c:
        reply = await c.complete()
        assert (reply.status, reply.error["code"]) == (503, "prefill_unavailable")
        assert reply.error["reason"] == "no_prefill_instance"
        reply = await c.complete({"prompt": "a", "n": 2})
        assert (reply.status, reply.error["code"]) == (400, "cannot_be_divided")
        assert d.seen == []
        async with c.session.get(c.url + "/ready") as response:
            assert response.status == 503


async def test_a_router_whose_only_decode_computes_nothing_is_ready_with_its_prefill():
    rooms = Rooms()
    async with (
        cluster([sglang_prefill(rooms)], [sglang_decode(rooms)]) as c,
        c.session.get(c.url + "/ready") as response,
    ):
        assert (response.status, (await response.json())["path"]) == (200, "disaggregated")


async def test_servers_that_do_not_have_a_model_say_so_themselves():
    """SGLang's take any name for their model's."""
    rooms = Rooms()
    async with cluster([p := sglang_prefill(rooms)], [sglang_decode(rooms)]) as c:
        assert (await c.complete({"prompt": "a", "model": "other"})).status == 200
        assert p.seen[0].body["model"] == "other"


async def test_servers_of_two_ways_serve_beside_one_another_and_never_meet():
    rooms = Rooms()
    p, d, other_p, other_d = sglang_prefill(rooms), sglang_decode(rooms), prefill_engine(), decode_engine()
    async with cluster([p, other_p], [d, other_d]) as c:
        assert [(await c.complete()).status for _ in range(8)] == [200] * 8
        assert len(p.seen) == len(d.seen) == len(other_p.seen) == len(other_d.seen) == 4
        assert all("kv_transfer_params" not in seen.body for seen in (*p.seen, *d.seen))
        assert all("bootstrap_room" not in seen.body for seen in (*other_p.seen, *other_d.seen))
        assert len((await c.members())["incompatible_pairs"]) == 2


async def test_a_whole_server_of_sglang_serves_alone():
    async def behave(request, seen):
        assert "bootstrap_room" not in seen.body
        return web.json_response(answer("one two"))

    rooms = Rooms()
    async with cluster([sglang_prefill(rooms)], [sglang_engine("null", behave)]) as c:
        assert (await c.complete()).headers["x-kvferry-path"] == "decode-only"


async def test_a_stub_without_a_room_refuses_as_sglang_does():
    rooms = Rooms()
    p = sglang_prefill(rooms)
    async with (
        cluster([p], [sglang_decode(rooms)]) as c,
        c.session.post(p.url + "/v1/completions", json={"prompt": "a"}) as response,
    ):
        assert (response.status, (await response.json())["error"]["message"]) == (400, NO_ROOM)
