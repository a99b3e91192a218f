"""Choices among very many instances: as good as among a few, without a look at each of them."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.router.config import PolicySettings
from kvferry.router.fleet.candidates import MAX_OFFERED, NUM_HOMES, Candidates
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceRequest, InstanceState, Origin, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import PAIR_BREAKER, InstancePool
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import Instance, RequestCost, Role
from kvferry.router.telemetry.metrics import Metrics

NUM_INSTANCES = 1000
PROMPT = RequestCost(prompt_tokens=1000, new_tokens=100)
OURS = EngineInfo("kvferry", "1", "9", models=("m",), cache="c")


class Fleet:
    """A pool of half prefill and half decode instances, all ready, and what its policy was asked."""

    def __init__(self, num_instances: int, seed: int = 1) -> None:
        self.queries = []
        half = num_instances // 2
        self.prefill, self.decode = (
            [Instance(f"http://{role}{number}", role) for number in range(half)] for role in Role
        )
        settings = PolicySettings(self._asked, clock=lambda: 100.0, seed=seed)
        self.pool = InstancePool((*self.prefill, *self.decode), Metrics(), settings)
        for instance in self.pool.instances:
            self.pool.introduce(instance, OURS)
            self.pool.probed(instance, ProbeResult.READY, "")

    def _asked(self, query):
        self.queries.append(query)
        return balanced(query)

    def take(self, role, *partners, cost=PROMPT) -> Instance | None:
        found = self.pool.reserve(InstanceRequest(role, cost, partners=partners))
        return found.instance if isinstance(found, Reservation) else None

    def only(self, instances, *usable, result=ProbeResult.DOWN):
        """Nobody else of these answers."""
        for instance in set(instances) - set(usable):
            self.pool.probed(instance, result, "")


def starts_with(prefix: int) -> RequestCost:
    return RequestCost(prompt_tokens=1000, new_tokens=100, prefixes=(prefix,), prefix_tokens=256)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("num_instances", [2 * MAX_OFFERED, NUM_INSTANCES])
def test_a_policy_is_offered_at_most_so_many(role, num_instances):
    fleet = Fleet(num_instances)
    partners = fleet.decode[:1] if role is Role.PREFILL else ()
    for number in range(5):
        assert fleet.take(role, *partners, cost=starts_with(number))
        query = fleet.queries[-1]
        assert len({load.instance for load in query.candidates}) == len(query.candidates)
        # Some that are drawn are homes as well.
        least = MAX_OFFERED if num_instances == 2 * MAX_OFFERED else MAX_OFFERED - NUM_HOMES
        assert least <= len(query.candidates) <= MAX_OFFERED
        assert len(query.decode) == 1 if partners else len(query.prefill) >= least


@pytest.mark.parametrize("role", Role)
def test_work_spreads_over_all(role):
    fleet = Fleet(NUM_INSTANCES)
    of_role = fleet.prefill if role is Role.PREFILL else fleet.decode
    taken = Counter(fleet.take(role) for _ in range(4 * len(of_role)))
    assert set(taken) == set(of_role)
    # Drawn without a look at loads the busiest would have about 13.
    assert max(taken.values()) <= 5


def count_looks(monkeypatch, fleet, cost):
    """How many instances are looked at for a request, prefill and decode, after the first of its kind."""
    looks, load = [], InstanceState.load
    monkeypatch.setattr(InstanceState, "load", lambda state, *rest: looks.append(state) or load(state, *rest))
    can_serve = InstanceState.can_serve
    monkeypatch.setattr(InstanceState, "can_serve", lambda state, now: looks.append(state) or can_serve(state, now))
    for _ in range(2):
        looks.clear()
        decode = fleet.take(Role.DECODE, cost=cost)
        assert fleet.take(Role.PREFILL, decode, cost=cost)
    return len(looks)


@pytest.mark.parametrize("cost", [PROMPT, starts_with(7)], ids=["plain", "prefix"])
def test_ten_times_as_many_instances_are_not_more_work(monkeypatch, cost):
    fleets = [Fleet(num_instances) for num_instances in (400, 4000)]
    with monkeypatch.context() as patched:
        few = count_looks(patched, fleets[0], cost)
    assert count_looks(monkeypatch, fleets[1], cost) <= few + MAX_OFFERED


def test_one_that_is_ready_is_found_among_all_that_are_not():
    fleet = Fleet(NUM_INSTANCES)
    fleet.only(fleet.decode, fleet.decode[17])
    fleet.only(fleet.prefill, fleet.prefill[170], result=ProbeResult.UNREADY)
    assert {fleet.take(Role.DECODE) for _ in range(5)} == {fleet.decode[17]}
    assert {fleet.take(Role.PREFILL, fleet.decode[17]) for _ in range(5)} == {fleet.prefill[170]}


def test_the_two_that_can_work_together_are_found_among_all_that_cannot():
    fleet = Fleet(NUM_INSTANCES)
    later = EngineInfo("kvferry", "2", "10", models=("m",), cache="c")
    pair = fleet.prefill[33], fleet.decode[44]
    fleet.only(fleet.prefill, pair[0])
    for instance in pair:
        fleet.pool.introduce(instance, later)
    assert {fleet.take(Role.DECODE) for _ in range(5)} == {pair[1]}
    assert {fleet.take(Role.PREFILL, pair[1]) for _ in range(5)} == {pair[0]}
    assert len(fleet.pool.incompatible) == 2 * (NUM_INSTANCES // 2 - 1)


def test_a_broken_pair_is_left_alone():
    fleet = Fleet(NUM_INSTANCES)
    decode = fleet.decode[0]
    fleet.only(fleet.prefill, *fleet.prefill[:2])
    for _ in range(PAIR_BREAKER.num_failures):
        fleet.pool.lost((fleet.prefill[0], decode), "digest", None)
    assert {fleet.take(Role.PREFILL, decode) for _ in range(5)} == {fleet.prefill[1]}
    fleet.only(fleet.prefill, fleet.prefill[0])
    assert decode not in {fleet.take(Role.DECODE) for _ in range(NUM_INSTANCES)}


def test_a_model_that_one_of_all_has_is_found():
    fleet = Fleet(NUM_INSTANCES)
    fleet.pool.introduce(fleet.decode[5], EngineInfo("kvferry", "1", "9", models=("other",), cache="c"))
    cost = RequestCost(model="other")
    assert {fleet.take(Role.DECODE, cost=cost) for _ in range(5)} == {fleet.decode[5]}
    # Nobody has it: somebody says so.
    assert fleet.take(Role.DECODE, cost=RequestCost(model="nobody's"))


def test_prompts_that_begin_alike_meet_and_others_do_not():
    fleet = Fleet(NUM_INSTANCES)
    taken = Counter()
    for prefix in range(200):
        reservations = [
            fleet.pool.reserve(InstanceRequest(Role.PREFILL, starts_with(prefix), partners=(fleet.decode[0],)))
            for _ in range(2)
        ]
        homes = {reservation.instance for reservation in reservations}
        for reservation in reservations:
            reservation.release()
        assert len(homes) == 1
        taken.update(homes)
    assert len(taken) > 100


def test_homes_are_the_same_whoever_comes_first():
    instances = Fleet(NUM_INSTANCES).prefill
    one, other = (
        Candidates({each: InstanceState(each, Origin.FILE, 0.0) for each in order}).group(Role.PREFILL)
        for order in (instances, instances[::-1])
    )
    for prefix in range(50):
        homes = one.homes((prefix,))
        assert homes == other.homes((prefix,))
        assert len(homes) == NUM_HOMES


def test_the_same_seed_has_the_same_choices():
    fleets = [Fleet(NUM_INSTANCES, seed) for seed in (3, 3, 4)]
    choices = [[fleet.take(Role.DECODE) for _ in range(20)] for fleet in fleets]
    assert choices[0] == choices[1] != choices[2]


def test_names_of_models_that_clients_make_up_are_not_kept():
    fleet = Fleet(4)
    for number in range(3000):
        fleet.take(Role.DECODE, cost=RequestCost(model=str(number)))
    assert len(fleet.pool._queries._candidates._groups) <= 1024
