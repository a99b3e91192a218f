"""The breaker and the pairs, on a virtual clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.fleet.circuit_breaker import Breaker, BreakerSettings, BreakerState, BreakerTable
from kvferry.router.fleet.instance import INSTANCE_BREAKER, InstanceState, Origin, Reservation
from kvferry.router.policy.records import NO_COST, Instance, Role

FUSE = BreakerSettings(num_failures=3, open_s=5.0, max_open_s=20.0)
P0, P1 = (Instance(f"http://p{i}", Role.PREFILL) for i in range(2))
D0, D1 = (Instance(f"http://d{i}", Role.DECODE) for i in range(2))


def blown(at: float = 0.0) -> Breaker:
    breaker = Breaker(FUSE)
    for _ in range(FUSE.num_failures):
        breaker.failed(at)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row():
    breaker = Breaker(FUSE)
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.may_begin(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.may_begin(4.9)


def test_after_a_while_one_is_let_through():
    breaker = blown()
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert breaker.may_begin(5.0)
    breaker.begin(5.0)
    assert not breaker.may_begin(6.0)
    breaker.succeeded()
    assert breaker.state(6.0) is BreakerState.CLOSED


def test_a_trial_whose_answer_is_long_does_not_keep_others_out():
    """Nobody knows how long an answer will be; one that does not even begin says that nothing is well."""
    breaker = blown()
    trial = breaker.begin(5.0)
    assert not breaker.may_begin(60.0)
    breaker.answers(60.0, trial)
    assert not breaker.may_begin(64.9)
    assert breaker.may_begin(65.0)
    second = breaker.begin(65.0)
    # How long others wait is up to the newest one.
    breaker.answers(66.0, trial)
    assert not breaker.may_begin(90.0)
    breaker.abandoned(trial)
    assert not breaker.may_begin(90.0)
    breaker.abandoned(second)
    assert breaker.may_begin(90.0)


def test_an_instance_whose_trial_answers_gets_another_one_after_a_while():
    member, now = InstanceState(P0, Origin.COMMAND_LINE, math.inf), [INSTANCE_BREAKER.open_s]
    for _ in range(INSTANCE_BREAKER.num_failures):
        member.breaker.failed(0.0)
    reservation = Reservation(member, NO_COST, lambda: now[0])
    assert not member.breaker.may_begin(1e9)
    reservation.answers()
    assert not member.breaker.may_begin(now[0])
    assert member.breaker.may_begin(now[0] + INSTANCE_BREAKER.open_s)


def test_any_trial_that_fails_opens_it_again_for_longer():
    """An engine whose streams all break off late, each after another trial has begun."""
    breaker = blown()
    first = breaker.begin(5.0)
    breaker.answers(6.0, first)
    second = breaker.begin(11.0)
    breaker.answers(12.0, second)
    breaker.failed(16.0, first)
    assert breaker.state(25.9) is BreakerState.OPEN
    assert breaker.may_begin(26.0)
    # What began before it opened again says nothing new.
    breaker.begin(26.0)
    breaker.failed(27.0, second)
    assert breaker.state(27.0) is BreakerState.HALF_OPEN


def test_a_trial_that_fails_doubles_the_time_up_to_a_limit():
    breaker, now = blown(), 5.0
    for open_s in (10.0, 20.0, 20.0):
        breaker.failed(now, breaker.begin(now))
        assert not breaker.may_begin(now + open_s - 0.1)
        assert breaker.may_begin(now + open_s)
        now += open_s
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(now)
    assert breaker.may_begin(now + 5.0)


def test_a_trial_that_tells_nothing_lets_the_next_one_through():
    breaker = blown()
    breaker.abandoned(breaker.begin(5.0))
    assert breaker.may_begin(5.0)


def test_what_began_before_neither_ends_a_trial_nor_fails_in_its_place():
    breaker = Breaker(FUSE)
    before = breaker.begin(0.0)
    for _ in range(FUSE.num_failures):
        breaker.failed(0.0)
    trial = breaker.begin(5.0)
    breaker.abandoned(before)
    assert not breaker.may_begin(5.0)
    breaker.failed(5.0, before)
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    breaker.failed(5.0, trial)
    assert breaker.state(5.0) is BreakerState.OPEN


def test_late_failures_of_requests_from_before_do_not_prolong_it():
    breaker = blown()
    breaker.failed(4.9)
    assert breaker.may_begin(5.0)


@pytest.mark.parametrize(("result", "state"), [("failed", BreakerState.OPEN), ("acquitted", BreakerState.HALF_OPEN)])
def test_an_instance_under_suspicion_is_not_tried_again_until_that_is_settled(result, state):
    """Its request is over, and another instance is asked meanwhile."""
    member, now = InstanceState(P0, Origin.COMMAND_LINE, math.inf), INSTANCE_BREAKER.open_s
    for _ in range(INSTANCE_BREAKER.num_failures):
        member.breaker.failed(0.0)
    reservation = Reservation(member, NO_COST, lambda: now)
    reservation.suspected()
    reservation.release()
    assert not member.breaker.may_begin(now)
    getattr(reservation, result)()
    assert member.breaker.state(now) is state
    assert member.breaker.may_begin(now) is (state is BreakerState.HALF_OPEN)


ENDS = st.sampled_from(["begin", "succeeded", "failed", "abandoned"])
EVENTS = st.lists(st.tuples(ENDS, st.integers(0, 9), st.floats(0, 10)), max_size=60)


def end(breaker, name, begun, now) -> None:
    match name:
        case "succeeded":
            breaker.succeeded()
        case "failed":
            breaker.failed(now, begun)
        case _:
            breaker.abandoned(begun)


@given(EVENTS)
def test_it_always_lets_something_through_in_the_end_and_never_two_while_half_open(events):
    """Whatever is under way ends in any order."""
    breaker, now, under_way, trials = Breaker(FUSE), 0.0, [], set()
    for name, which, wait_s in events:
        now += wait_s
        if name == "begin" and breaker.may_begin(now):
            begun = breaker.begin(now)
            under_way.append(begun)
            assert begun is None or not trials
            trials |= {begun} - {None}
        elif name != "begin" and under_way:
            begun = under_way.pop(which % len(under_way))
            end(breaker, name, begun, now)
            # One that works ends all doubt.
            trials = set() if name == "succeeded" else trials - {begun}
    for begun in under_way:
        breaker.abandoned(begun)
    assert breaker.may_begin(now + FUSE.max_open_s)


def test_an_earlier_trial_says_nothing_of_a_later_one():
    breaker = blown()
    earlier = breaker.begin(5.0)
    breaker.failed(5.0, earlier)
    later = breaker.begin(15.0)
    breaker.failed(15.0, earlier)
    breaker.abandoned(earlier)
    assert breaker.state(15.0) is BreakerState.HALF_OPEN
    assert not breaker.may_begin(15.0)
    breaker.abandoned(later)
    assert breaker.may_begin(15.0)


def test_a_pair_that_keeps_failing_is_out_and_the_others_are_not():
    pairs = BreakerTable(FUSE)
    assert [pairs.failed((P0, D0), 0.0) for _ in range(4)] == [False, False, True, False]
    assert not pairs.may_begin((P0, D0), 1.0)
    assert all(pairs.may_begin(pair, 1.0) for pair in ((P0, D1), (P1, D0), (P1, D1)))
    assert pairs.not_closed(1.0) == [(P0, D0)]
    trial = pairs.begin((P0, D0), 5.0)
    assert not pairs.may_begin((P0, D0), 5.0)
    pairs.abandoned((P0, D0), trial)
    assert pairs.may_begin((P0, D0), 5.0)
    assert pairs.succeeded((P0, D0))
    assert not pairs.succeeded((P0, D0))
    assert pairs.not_closed(5.0) == []


def test_a_new_incarnation_is_not_blamed_for_the_old_one():
    pairs = BreakerTable(FUSE)
    for _ in range(3):
        pairs.failed((P0, D0), 0.0)
    pairs.forget(lambda pair: P1 in pair)
    assert not pairs.may_begin((P0, D0), 0.0)
    pairs.forget(lambda pair: D0 in pair)
    assert pairs.may_begin((P0, D0), 0.0)
