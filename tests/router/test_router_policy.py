"""Laws of the choice between instances."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.membership import Membership
from kvferry.router.metrics import Metrics
from kvferry.router.policy import Instance, Load, Role, choose

INSTANCES = tuple(Instance(f"http://h{i}", Role.DECODE) for i in range(6))


@st.composite
def loads(draw):
    num = draw(st.integers(0, len(INSTANCES)))
    last = draw(st.permutations(range(num)))
    return [
        Load(instance, draw(st.booleans()), draw(st.integers(0, 4)), last[i])
        for i, instance in enumerate(INSTANCES[:num])
    ]


@given(loads())
def test_the_choice_is_healthy_least_loaded_and_longest_unchosen(loads):
    healthy = [load for load in loads if load.healthy]
    chosen = choose(loads)
    if not healthy:
        assert chosen is None
        return
    [load] = [load for load in healthy if load.instance == chosen]
    least = min(other.num_outstanding for other in healthy)
    assert load.num_outstanding == least
    assert all(load.last_chosen <= other.last_chosen for other in healthy if other.num_outstanding == least)


@given(loads(), st.randoms())
def test_the_choice_does_not_depend_on_the_order(loads, random):
    shuffled = list(loads)
    random.shuffle(shuffled)
    assert choose(loads) == choose(shuffled)


def test_a_tie_from_the_start_goes_to_the_first():
    assert choose([Load(i, True, 0, 0) for i in INSTANCES]) == INSTANCES[0]


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=60))
def test_idle_instances_take_turns_and_busy_ones_stay_level(num, finishes):
    """Requests arrive, or the oldest one ends: loads differ by at most what the endings took away."""
    membership = Membership(INSTANCES[:num], Metrics())
    for instance in INSTANCES[:num]:
        membership.mark_up(instance)
    outstanding = {instance: 0 for instance in INSTANCES[:num]}
    running = []
    for finish in finishes:
        if finish and running:
            ended = running.pop(0)
            membership.release(ended)
            outstanding[ended] -= 1
        else:
            chosen = membership.reserve(Role.DECODE, frozenset())
            assert outstanding[chosen] == min(outstanding.values())
            running.append(chosen)
            outstanding[chosen] += 1
    assert max(outstanding.values()) - min(outstanding.values()) <= 1


def test_sequential_requests_go_round():
    membership = Membership(INSTANCES[:3], Metrics())
    for instance in INSTANCES[:3]:
        membership.mark_up(instance)
    turns = []
    for _ in range(7):
        instance = membership.reserve(Role.DECODE, frozenset())
        turns.append(INSTANCES.index(instance))
        membership.release(instance)
    assert turns == [0, 1, 2, 0, 1, 2, 0]


def test_an_instance_back_from_an_outage_gets_its_share_and_not_more():
    membership = Membership(INSTANCES[:2], Metrics())
    membership.mark_up(INSTANCES[0])
    for _ in range(5):
        membership.release(membership.reserve(Role.DECODE, frozenset()))
    membership.mark_up(INSTANCES[1])
    turns = []
    for _ in range(4):
        instance = membership.reserve(Role.DECODE, frozenset())
        turns.append(INSTANCES.index(instance))
        membership.release(instance)
    assert turns == [1, 0, 1, 0]


def test_excluded_unhealthy_and_other_roles_are_not_chosen():
    prefill = dataclasses.replace(INSTANCES[3], role=Role.PREFILL)
    membership = Membership((*INSTANCES[:2], prefill), Metrics())
    assert membership.reserve(Role.DECODE, frozenset()) is None
    membership.mark_up(prefill)
    membership.mark_up(INSTANCES[0])
    assert membership.reserve(Role.DECODE, frozenset()) == INSTANCES[0]
    assert membership.reserve(Role.DECODE, frozenset(INSTANCES[:1])) is None
    assert membership.reserve(Role.PREFILL, frozenset()) == prefill
