"""A computed prompt of which no decode instance has been told, since nobody was there: another one is asked with it."""

import asyncio

import pytest
from router_harness import cluster, decode_engine, prefill_engine
from test_router_early import EARLY_DECODES, LONG, Prompt, early_engine, to_promised
from test_router_early import PARAMS as PROMISED_PARAMS
from test_router_early import released as promise_released
from test_router_flow import D0, D1, D2, P0, P1, REQUEST, failed, pick, play, retry
from test_router_members import pool_of, taken
from test_router_mixed_rooms import OURS, ROOM, SGLANG, to_room
from test_router_mixed_rooms import release as room_released
from test_router_release import PARAMS, released, to_decoding

from kvferry.router.commands import Cancel, Count, Counted, Pick, Refuse, Relay, Send
from kvferry.router.events import ClientGone, Failed, Opened, Picked
from kvferry.router.fleet.candidates import MAX_OFFERED
from kvferry.router.fleet.engine_info import EngineInfo, differences
from kvferry.router.fleet.instance import Origin, ProbeResult
from kvferry.router.fleet.instance_pool import PAIR_BREAKER
from kvferry.router.flow.attempts import MAX_GONE
from kvferry.router.flow.state_machine import Flow, State
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role
from kvferry.router.request.client_request import decode_body

DIVIDED = decode_body(REQUEST, PARAMS)
REFUSED = Failed("refused", "x")
LOST = failed(Role.DECODE, "refused")
AGAIN = retry(Role.DECODE, "refused")


def pick_for_cache(*excluded):
    """A decode instance that can take what P0 has computed."""
    return Pick(Role.DECODE, frozenset(excluded), source=P0)


# --- playbooks


@pytest.mark.parametrize("reason", ["refused", "unreachable", "connect_timeout"])
def test_what_nobody_has_read_another_one_is_asked_with(reason):
    play(
        Flow(REQUEST),
        *to_decoding(),
        (Failed(reason, "x"), [failed(Role.DECODE, reason), pick_for_cache(D0)]),
        (Picked(D1), [retry(Role.DECODE, reason), Send(D1, DIVIDED)]),
        (Opened(True), [Relay()]),
        (ClientGone(), [Cancel()]),
    )


def test_a_promise_is_kept_for_another_one_as_well():
    play(
        Flow(REQUEST),
        *to_promised(),
        (REFUSED, [LOST, pick_for_cache(D0)]),
        (Picked(D1), [AGAIN, Send(D1, decode_body(REQUEST, PROMISED_PARAMS))]),
        (ClientGone(), [promise_released("client_left"), Cancel()]),
    )


def test_what_a_second_one_may_have_read_no_third_one_gets():
    play(
        Flow(REQUEST),
        *to_decoding(),
        (REFUSED, [LOST, pick_for_cache(D0)]),
        (Picked(D1), [AGAIN, Send(D1, DIVIDED)]),
        (Failed("reset", "x"), [failed(Role.DECODE, "reset"), released("decode_failed"), pick(Role.DECODE, D0, D1)]),
        (Picked(D2), [retry(Role.DECODE, "reset"), pick(Role.PREFILL, D0, D1)]),
    )


def test_where_no_other_one_can_take_it_a_new_pair_is_looked_for():
    play(
        Flow(REQUEST),
        *to_decoding(),
        (REFUSED, [LOST, pick_for_cache(D0)]),
        (NoInstance(), [released("decode_failed"), pick(Role.DECODE, D0)]),
        (Picked(D1), [AGAIN, pick(Role.PREFILL, D0)]),
    )


def test_where_there_is_no_other_one_it_is_released_and_the_client_told():
    flow = Flow(REQUEST)
    play(
        flow,
        *to_decoding(),
        (REFUSED, [LOST, pick_for_cache(D0)]),
        (NoInstance(), [released("decode_failed"), pick(Role.DECODE, D0)]),
    )
    (told,) = flow.handle(NoInstance())
    assert isinstance(told, Refuse)
    assert (told.status, flow.state) == (502, State.DONE)


def test_a_policy_that_has_nobody_for_it_lets_go_of_it():
    flow = Flow(REQUEST)
    play(flow, *to_decoding(), (REFUSED, [LOST, pick_for_cache(D0)]))
    counted, release, told = flow.handle(Overloaded("full", 3))
    assert (counted, release) == (Count(Counted.TURNED_AWAY, Role.DECODE, "full"), released("decode_failed"))
    assert isinstance(told, Refuse)


def test_it_is_released_when_nobody_is_anywhere():
    flow = Flow(REQUEST)
    lost = [D0, *(Instance(f"http://lost{number}", Role.DECODE) for number in range(MAX_GONE))]
    play(flow, *to_decoding())
    for number, decode in enumerate(lost[1:], 1):
        play(flow, (REFUSED, [LOST, pick_for_cache(*lost[:number])]), (Picked(decode), [AGAIN, Send(decode, DIVIDED)]))
    play(flow, (REFUSED, [LOST, pick_for_cache(*lost)]), (Picked(D1), [AGAIN, Send(D1, DIVIDED)]))
    counted, release, told = flow.handle(REFUSED)
    assert (counted, release) == (LOST, released("decode_failed"))
    assert isinstance(told, Refuse)


def test_whom_a_prefill_was_to_meet_in_a_room_nobody_else_can_be():
    play(
        Flow(REQUEST),
        *to_room(ROOM, computes=False),
        (REFUSED, [LOST, room_released("decode_failed"), pick(Role.DECODE, D0)]),
    )


# --- who can take it


def test_only_who_can_take_the_cache_is_chosen():
    pool, _ = pool_of(P0, P1, D0, D1, D2)
    for number, instance in enumerate((P0, P1, D0, D1, D2)):
        cache = "cache-b" if instance in (P1, D0) else "cache-a"
        pool.introduce(instance, EngineInfo("kvferry", "1", "1", f"e{number}", ("m",), cache))
    assert {taken(pool, Role.DECODE, P0) for _ in range(4)} == {D1, D2}
    assert {taken(pool, Role.DECODE, P1) for _ in range(4)} == {D0}
    for _ in range(PAIR_BREAKER.num_failures):
        pool.lost((P0, D1), "digest", None)
    assert {taken(pool, Role.DECODE, P0) for _ in range(4)} == {D2}


def test_a_cache_that_is_referred_to_is_for_nobody_who_would_meet_in_a_room():
    """Servers of SGLang are told of a room before anything is computed."""
    pool, _ = pool_of(P0, D0, D1)
    for instance, info in ((P0, OURS), (D0, SGLANG), (D1, OURS)):
        pool.introduce(instance, info)
    assert differences(OURS, SGLANG) == ()
    assert {taken(pool, Role.DECODE, P0) for _ in range(4)} == {D1}
    assert {taken(pool, Role.DECODE) for _ in range(4)} == {D0, D1}


def test_the_only_one_of_very_many_that_can_read_a_cache_is_found():
    """A policy is offered some of them, and most of those would meet in a room."""
    many = [Instance(f"http://many{number}", Role.DECODE) for number in range(10 * MAX_OFFERED)]
    pool, _ = pool_of(P0, *many)
    for instance in (P0, *many):
        pool.introduce(instance, OURS if instance in (P0, many[300]) else SGLANG)
    assert {taken(pool, Role.DECODE, P0) for _ in range(4)} == {many[300]}


def test_an_instance_that_wants_no_requests_is_not_given_one_for_the_sake_of_a_cache():
    pool, _ = pool_of(P0, D0, D1)
    pool.probed(D0, ProbeResult.UNREADY, "")
    assert {taken(pool, Role.DECODE, P0) for _ in range(4)} == {D1}
    pool.probed(D1, ProbeResult.UNREADY, "")
    assert taken(pool, Role.DECODE, P0) is None
    # With another prefill one that at least answers is better than nobody.
    assert taken(pool, Role.DECODE) is not None


@pytest.mark.parametrize("ends", ["down", "left"])
def test_what_has_gone_with_its_instance_nobody_is_asked_with(ends):
    pool, _ = pool_of(P0, D0)
    assert taken(pool, Role.DECODE, P0) == D0
    if ends == "down":
        pool.probed(P0, ProbeResult.DOWN, "")
    else:
        pool.remove(P0, Origin.COMMAND_LINE)
    assert taken(pool, Role.DECODE, P0) is None
    assert taken(pool, Role.DECODE) == D0


# --- on sockets


async def test_a_prompt_that_is_still_computed_is_promised_to_who_is_there():
    prompt, decode = Prompt(), [decode_engine(f"d{number}") for number in range(3)]
    prompt.may_end.set()
    prefill = early_engine("p0", prompt)
    async with cluster([prefill], decode, early_from_tokens=1) as c:
        await asyncio.gather(*(engine.stop() for engine in decode[:2]))
        assert (await c.complete(LONG)).status == 200
        assert (len(prefill.seen), len(decode[2].seen)) == (1, 1)
        assert await c.metric(EARLY_DECODES) == 1
        await c.until_idle()
        assert prefill.released.empty()


async def test_decode_engines_that_have_just_died_cost_no_second_prefill():
    prefill, decode = prefill_engine(), [decode_engine(f"d{number}") for number in range(4)]
    async with cluster([prefill], decode) as c:
        await asyncio.gather(*(engine.stop() for engine in decode[:3]))
        response = await c.complete()
        assert (response.status, response.headers["x-kvferry-path"]) == (200, "disaggregated")
        assert (len(prefill.seen), len(decode[3].seen)) == (1, 1)
        # And the pair that has answered is the one that is measured.
        pair = f'decode="{decode[3].url}",phase="prefill",prefill="{prefill.url}"'
        assert await c.metric(f"kvferry_router_phase_seconds_count{{{pair}}}") == 1
