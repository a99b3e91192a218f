"""SGLang on one side and another engine on the other: who is paired, what each is asked, and how that goes."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from router_harness import DONE, answer, cluster, decoding, failing, hanging, resetting
from sglang_stubs import BACKEND, USAGE, Rooms, other_decode, other_prefill, room_fields, sglang_decode, sglang_prefill
from test_router_flow import D0, D1, P0, P1, RAW, REQUEST, failed, fallback, pick, pick_alone, play, retry
from test_router_rooms import expect_another_prefill, rooms_of

from kvferry.kv_transfer_params import from_params, room_names, room_of, room_params
from kvferry.router.commands import Cancel, Count, Counted, Forward, Relay, Release, Send, Start
from kvferry.router.config import PrefillFallback
from kvferry.router.events import (
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
    Picked,
    Room,
)
from kvferry.router.fleet.engine_info import EngineInfo, Handover, differences, handover_between
from kvferry.router.fleet.instance import INSTANCE_BREAKER
from kvferry.router.fleet.rooms import room_between
from kvferry.router.flow.state_machine import Flow
from kvferry.router.policy.records import Instance, NoInstance, Role
from kvferry.router.request.client_request import (
    Endpoint,
    first_token_body,
    parse_request,
    room_decode_body,
    room_prefill_body,
)

NUMBER = 4611686018427387
PREFILL = Instance("http://10.0.0.5:30000", Role.PREFILL)
OURS = EngineInfo("kvferry", wire_version="8", meets_in_rooms=True, bootstrap_host="10.0.0.6", bootstrap_port=9007)
VLLM = EngineInfo("vllm", wire_version="8", cache="c", meets_in_rooms=True, bootstrap_host="::1", bootstrap_port=8999)
SGLANG = EngineInfo(
    "sglang",
    wire_version="8",
    handover=Handover.ROOM,
    transfer_backend="kvferry",
    bootstrap_host="10.0.0.5",
    bootstrap_port=8998,
    computes_prompts=False,
)


def changed(info: EngineInfo, **more: object) -> EngineInfo:
    return EngineInfo(**{name: getattr(info, name) for name in EngineInfo.__struct_fields__} | more)


# --- who is paired


@pytest.mark.parametrize("other", [OURS, VLLM])
def test_engines_of_rooms_and_those_that_can_meet_are_pairs_both_ways(other):
    assert handover_between(SGLANG, other) is handover_between(other, SGLANG) is Handover.ROOM
    assert differences(SGLANG, other) == differences(other, SGLANG) == ()
    assert handover_between(other, other) is Handover.REFERENCE
    assert handover_between(OURS, VLLM) is Handover.REFERENCE
    assert handover_between(SGLANG, SGLANG) is Handover.ROOM


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (changed(OURS, meets_in_rooms=False), "handover: reference and room"),
        (changed(OURS, bootstrap_port=0), "handover: reference and room"),
        (changed(OURS, wire_version=""), "handover: reference and room"),
        (changed(OURS, handover=Handover.NONE), "handover: none and room"),
        (changed(OURS, wire_version="7"), "wire_version: 7 and 8"),
        (changed(OURS, cache="other"), "cache: other and c"),
        (changed(OURS, models=("a",)), "model: a and b"),
    ],
)
def test_what_keeps_a_prefill_from_sglang(info, expected):
    assert differences(info, changed(SGLANG, cache="c", models=("b",)))[0] == expected


def test_a_server_of_sglang_with_another_backend_meets_nobody_else():
    theirs = changed(SGLANG, wire_version="", transfer_backend="nixl", bootstrap_host="")
    assert differences(theirs, OURS) == ("handover: room and reference",)
    assert differences(OURS, theirs) == ("handover: reference and room",)


def test_who_only_decodes_in_a_room_need_not_say_where_it_listens():
    decodes = changed(OURS, bootstrap_host="", bootstrap_port=0)
    assert differences(SGLANG, decodes) == ()


# --- what each is asked


def test_each_engine_is_told_of_a_room_in_its_own_words():
    room = room_between(PREFILL, SGLANG, OURS, NUMBER)
    assert json.loads(room.prefill) == room_fields("10.0.0.5", 8998, NUMBER)
    params = json.loads(room.decode)["kv_transfer_params"]
    assert (params["remote_host"], params["remote_port"], params["kvferry"]) == ("10.0.0.5", 8998, {"room": NUMBER})
    assert params["do_remote_prefill"]
    assert room.kept == b""


@pytest.mark.parametrize(("info", "host"), [(OURS, "10.0.0.6"), (VLLM, "::1")])
def test_a_prefill_of_others_is_asked_to_keep_what_sglang_will_read(info, host):
    room = room_between(PREFILL, info, SGLANG, NUMBER)
    params = json.loads(room.prefill)["kv_transfer_params"]
    assert params["do_remote_decode"]
    assert room_of(params) == NUMBER
    assert json.loads(room.decode) == room_fields(host, info.bootstrap_port, NUMBER)
    kept = from_params(json.loads(room.kept), "any host").reference
    assert (kept.request_id, kept.lease_id) == room_names(NUMBER)


def test_the_first_token_is_drawn_as_the_client_wants_it_and_no_more_are():
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "temperature": 0.5}
    client = {**body, "max_tokens": 50, "max_completion_tokens": 40, "min_tokens": 3, "stop": ["x"], "stream": True}
    request = parse_request(json.dumps(client).encode(), Endpoint.CHAT)
    room = room_between(PREFILL, OURS, SGLANG, NUMBER)
    one = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stop": ["x"], "stream": False}
    assert json.loads(first_token_body(request, room.prefill)) == {**body, **one, **json.loads(room.prefill)}


@pytest.mark.parametrize(("given", "asked"), [(b"0", 0), (b"1", 1), (b"null", None), (b'"x"', "x"), (b"-1", -1)])
def test_what_an_engine_refuses_as_a_least_number_of_tokens_it_sees(given, asked):
    request = parse_request(b'{"prompt": "a", "min_tokens": ' + given + b"}", Endpoint.COMPLETIONS)
    assert json.loads(first_token_body(request, b'{"x":1}'))["min_tokens"] == asked


# --- playbooks


KEPT, OTHER_KEPT = (b'{"do_remote_prefill":true,"kvferry":{"room":%d}}' % number for number in (7, 8))
ROOM, OTHER_ROOM = Room(b'{"p":7}', b'{"d":7}', KEPT), Room(b'{"p":8}', b'{"d":8}', OTHER_KEPT)
TO_COMPUTING = Room(b'{"p":7}', b'{"d":7}')
D_ERROR = Answered(500, b'{"message": "Decode transfer failed", "code": 500}')


def begun(room: Room, prefill: Instance = P0, decode: Instance = D0) -> list:
    body = first_token_body if room.kept else room_prefill_body
    return [Start(prefill, body(REQUEST, room.prefill)), Send(decode, room_decode_body(REQUEST, room.decode))]


def to_room(room: Room, computes: bool):
    return (
        (Began(), [pick(Role.DECODE)]),
        (Picked(D0, computes=computes), [pick(Role.PREFILL)]),
        (Picked(P0, room=room), begun(room)),
    )


def release(reason: str, instance: Instance = P0, kept: bytes = KEPT) -> Release:
    return Release(instance, b'{"kv_transfer_params": ' + kept + b"}", reason)


@pytest.mark.parametrize(
    ("event", "commands"),
    [
        (ClientGone(), [release("client_left"), Cancel()]),
        (Answered(400, b"{}"), [release("decode_refused"), Forward()]),
        (Failed(PREFILL_REFUSED, "x"), [Forward()]),
        (
            Failed("reset", "x"),
            [failed(Role.DECODE, "reset"), release("decode_failed"), pick(Role.DECODE, D0)],
        ),
        (
            D_ERROR,
            [failed(Role.DECODE, "status_500"), release("decode_failed"), pick(Role.DECODE, D0, P0)],
        ),
        (Opened(True), [Relay()]),
    ],
)
def test_what_a_prefill_keeps_that_decode_will_not_read_is_released(event, commands):
    play(Flow(REQUEST), *to_room(ROOM, computes=False), (event, commands))


def test_a_prefill_at_which_nobody_was_keeps_nothing_and_is_no_suspect():
    """The one that was there is asked again when no other is left."""
    gone = Failed(PREFILL_GONE, "x")
    play(
        Flow(REQUEST),
        *to_room(ROOM, computes=False),
        (
            Failed(PREFILL_LOST, "x"),
            [failed(Role.DECODE, PREFILL_LOST), release("decode_failed"), pick(Role.DECODE, P0)],
        ),
        (Picked(D0, computes=False), [retry(Role.DECODE, PREFILL_LOST), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=OTHER_ROOM), begun(OTHER_ROOM, P1)),
        (gone, [failed(Role.DECODE, PREFILL_GONE), pick(Role.DECODE, P0, P1)]),
        (Picked(D0, computes=False), [retry(Role.DECODE, PREFILL_GONE), pick(Role.PREFILL, P0, P1)]),
        (NoInstance(), [pick(Role.PREFILL, P1)]),
        (Picked(P0, room=OTHER_ROOM), begun(OTHER_ROOM, P0)),
        (Opened(True), [Relay()]),
    )


def test_what_decode_has_read_is_not_released():
    play(Flow(REQUEST), *to_room(ROOM, computes=False), (Opened(True), [Relay()]), (ClientGone(), [Cancel()]))


def test_a_second_try_is_in_another_room_and_releases_that_one():
    play(
        Flow(REQUEST),
        *to_room(ROOM, computes=False),
        (
            Failed(PREFILL_LOST, "x"),
            [failed(Role.DECODE, PREFILL_LOST), release("decode_failed"), pick(Role.DECODE, P0)],
        ),
        (Picked(D0, computes=False), [retry(Role.DECODE, PREFILL_LOST), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=OTHER_ROOM), begun(OTHER_ROOM, P1)),
        (ClientGone(), [release("client_left", P1, OTHER_KEPT), Cancel()]),
    )


def test_a_request_that_has_no_more_time_is_released():
    flow = Flow(REQUEST)
    play(flow, *to_room(ROOM, computes=False))
    assert flow.handle(Failed(TOO_LATE, "x"))[0] == release(TOO_LATE)


def test_what_sglangs_prefill_refuses_a_decode_that_computes_serves():
    """It may only be about what SGLang does not know."""
    play(
        Flow(REQUEST),
        *to_room(TO_COMPUTING, computes=True),
        (Failed(PREFILL_REFUSED, "x"), [fallback("prefill_refused"), Send(D0, RAW)]),
        (Opened(True), [Relay()]),
        (Ended(), []),
    )


def test_what_prefill_refuses_the_client_hears_where_decode_may_not_compute():
    flow = Flow(REQUEST, PrefillFallback.REFUSE)
    play(flow, *to_room(TO_COMPUTING, computes=True), (Failed(PREFILL_REFUSED, "x"), [Forward()]))


def test_a_decode_that_computes_is_left_alone_when_two_prefills_are_lost():
    play(
        Flow(REQUEST),
        *to_room(TO_COMPUTING, computes=True),
        (Failed(PREFILL_LOST, "x"), [failed(Role.DECODE, PREFILL_LOST), pick(Role.DECODE, P0)]),
        (Picked(D1), [retry(Role.DECODE, PREFILL_LOST), pick(Role.PREFILL, P0)]),
        (Picked(P1, room=TO_COMPUTING), begun(TO_COMPUTING, P1, D1)),
        (
            Failed(PREFILL_LOST, "x"),
            [Count(Counted.UPSTREAM_ERROR, Role.DECODE, PREFILL_LOST), pick_alone(P0, P1)],
        ),
        (Picked(D1), [fallback("prefill_failed"), Send(D1, RAW)]),
    )


# --- on sockets


async def test_sglang_prefills_for_another_engine():
    rooms = Rooms()
    p, d = sglang_prefill(rooms, port=8765, kvferry=BACKEND), other_decode(rooms)
    async with cluster([p], [d]) as c:
        reply = await c.complete()
        assert (reply.status, json.loads(reply.raw)["choices"][0]["text"]) == (200, "one two")
        assert reply.headers["x-kvferry-path"] == "disaggregated"
        await c.until_idle()
        ((asked,), (served,)) = p.seen, d.seen
        (room,) = rooms_of(p)
        assert "kv_transfer_params" not in asked.body
        params = room_params(room, "127.0.0.1", 8765)
        assert served.body == {"model": "tiny", "prompt": "hello", "max_tokens": 9, "kv_transfer_params": params}
        members = await c.members()
        assert {one["handover"] for one in members["members"]} == {"room", "reference"}
        assert all(one["meets_in_rooms"] for one in members["members"])
        assert members["incompatible_pairs"] == []
        assert "kvferry_router_upstream_errors_total{" not in await c.metrics()
        assert "kvferry_router_releases_total{" not in await c.metrics()


async def test_another_engine_prefills_for_sglang():
    rooms = Rooms()
    p, d = other_prefill(rooms, port=9007), sglang_decode(rooms, kvferry=BACKEND)
    async with cluster([p], [d]) as c:
        reply = await c.complete({"model": "tiny", "prompt": "hello", "max_tokens": 9, "stream": True})
        assert reply.headers["x-kvferry-path"] == "disaggregated"
        assert reply.raw.endswith(DONE)
        await c.until_idle()
        ((asked,), (served,)) = p.seen, d.seen
        (room,) = rooms_of(d)
        assert asked.body["kv_transfer_params"] == {"do_remote_decode": True, "kvferry": {"room": room}}
        assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)
        place = room_fields("127.0.0.1", 9007, room)
        assert {name: served.body[name] for name in place} == place
        assert p.released.empty()
        assert await c.metric("kvferry_router_early_decodes_total") == 0


async def test_the_usage_says_what_the_other_engine_had_cached():
    rooms = Rooms()

    async def behave(request, seen):
        await rooms.of(seen).computed.wait()
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
        return web.json_response(answer("one two", usage=usage))

    d = sglang_decode(rooms, behave, kvferry=BACKEND)
    async with cluster([other_prefill(rooms)], [d]) as c:
        usage = json.loads((await c.complete()).raw)["usage"]
        assert usage["prompt_tokens_details"] == USAGE["prompt_tokens_details"]


@pytest.mark.parametrize("behave", [failing(500, "x"), resetting])
async def test_a_second_try_may_be_a_pair_of_another_kind(behave):
    rooms = Rooms()
    bad, good, d = (
        other_prefill(rooms, behave),
        sglang_prefill(rooms, kvferry=BACKEND),
        sglang_decode(rooms, kvferry=BACKEND),
    )
    async with cluster([bad, good], [d]) as c:
        await expect_another_prefill(c)


def after_prefill(rooms: Rooms):
    async def behave(request, seen):
        await rooms.of(seen).computed.wait()
        return await failing(500, "Decode transfer failed")(request, seen)

    return behave


async def test_what_an_engine_has_kept_for_a_decode_that_fails_is_released():
    rooms = Rooms()
    p = other_prefill(rooms, port=9007)
    bad, good = sglang_decode(rooms, after_prefill(rooms), kvferry=BACKEND), sglang_decode(rooms, kvferry=BACKEND)
    async with cluster([p], [bad, good]) as c:
        assert (await c.complete()).status == 200
        (room,) = rooms_of(bad)
        released = await p.released.get()
        assert released == {"kv_transfer_params": room_params(room, "127.0.0.1", 9007)}
        assert room not in rooms_of(good)
        assert p.released.empty()


@pytest.mark.parametrize("direction", ["from SGLang", "to SGLang"])
async def test_a_client_that_leaves_ends_both(direction):
    rooms = Rooms()
    if direction == "from SGLang":
        p, d = sglang_prefill(rooms, kvferry=BACKEND), other_decode(rooms, hanging)
    else:
        p, d = other_prefill(rooms, hanging), sglang_decode(rooms, kvferry=BACKEND)
    async with cluster([p], [d]) as c:
        await c.leave()
        if direction == "to SGLang":
            assert (await p.released.get())["kv_transfer_params"]["kvferry"] == {"room": rooms_of(d)[0]}


@pytest.mark.parametrize(
    ("prefills", "reason"),
    [
        ([], "no_prefill_instance"),
        ([failing(400, "no such field")], "prefill_refused"),
        ([resetting], "prefill_failed"),
    ],
)
async def test_a_decode_that_computes_does_without_sglang(prefills, reason):
    rooms = Rooms()
    ps = [sglang_prefill(rooms, behave, kvferry=BACKEND) for behave in prefills]
    d = other_decode(rooms)
    async with cluster(ps, [d]) as c:
        reply = await c.complete()
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "decode-only")
        assert reply.headers["x-kvferry-reason"] == reason
        assert "kv_transfer_params" not in d.seen[-1].body
        assert len(d.seen) == 1 + len(ps)
        await c.until_idle()


async def test_a_prefill_whose_room_is_left_does_not_end_what_decode_computes_alone():
    """SGLang's prefill server fails in time when nobody reads its cache: it is left before decode is asked again."""
    rooms = Rooms()
    p = sglang_prefill(rooms, hanging, kvferry=BACKEND)
    loads = []

    async def behave(request, seen):
        if "kv_transfer_params" in seen.body:
            await p.arrived.wait()
            return web.json_response({"error": {"message": "x", "type": "t", "code": "wrong_prompt"}}, status=502)
        await p.left.wait()
        loads.extend(one["in_flight_requests"] for one in (await c.members())["members"])
        return await decoding(request, seen)

    d = other_decode(rooms, behave)
    async with cluster([p], [d]) as c:
        reply = await c.complete()
        assert (reply.status, reply.headers["x-kvferry-reason"]) == (200, "wrong_prompt")
        assert (len(d.seen), loads) == (2, [0, 1])
        assert "kvferry_router_retries_total{" not in await c.metrics()


async def test_an_error_of_an_engine_beside_sglang_is_its_own():
    """It does not wait for decode to read: what goes wrong is not the pair's."""
    rooms = Rooms()
    bad, good = other_prefill(rooms, failing(500, "x")), other_prefill(rooms, port=9008)
    async with cluster([bad, good], [sglang_decode(rooms, kvferry=BACKEND)]) as c:
        while len(bad.seen) < INSTANCE_BREAKER.num_failures:
            assert (await c.complete()).status == 200
        await c.until_idle()
        members = await c.members()
        assert members["broken_pairs"] == []
        assert [one["breaker"] for one in members["members"]] == ["open", "closed", "closed"]


async def test_each_engine_meets_whom_it_can():
    """SGLang's with kvferry's backend meet all that can, others only their own."""
    rooms = Rooms()
    ps = [
        other_prefill(rooms, port=9007),
        sglang_prefill(rooms, port=9008, kvferry=BACKEND),
        sglang_prefill(rooms, port=9009, disaggregation_transfer_backend="nixl"),
    ]
    d, nixl = sglang_decode(rooms, kvferry=BACKEND), sglang_decode(rooms, disaggregation_transfer_backend="nixl")
    async with cluster(ps, [d, nixl]) as c:
        assert [(await c.complete()).status for _ in range(8)] == [200] * 8
        assert all(p.seen for p in ps)
        assert set(rooms_of(nixl)) == set(rooms_of(ps[2]))
        assert len((await c.members())["incompatible_pairs"]) == 3
