"""Choices among very many instances: as good as among a few, without a look at each of them."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from router_harness import cluster, decode_engine, prefill_engine

from kvferry.router.config import PolicySettings
from kvferry.router.fleet import instance_pool
from kvferry.router.fleet.candidates import MAX_OFFERED, NUM_HOMES, Candidates, Wanted
from kvferry.router.fleet.circuit_breaker import BreakerTable
from kvferry.router.fleet.engine_info import EngineInfo, Handover, differences
from kvferry.router.fleet.instance import InstanceRequest, InstanceState, Origin, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import PAIR_BREAKER, InstancePool
from kvferry.router.http.status import MAX_LISTED_PAIRS, status_of
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import Instance, Limits, NoInstance, Overloaded, RequestCost, Role
from kvferry.router.telemetry import metrics, scrapes
from kvferry.router.telemetry.metrics import Metrics

NUM_INSTANCES = 1000
DEADLINE_S = 30.0
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
        self.metrics = Metrics()
        self.pool = InstancePool((*self.prefill, *self.decode), self.metrics, settings)
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
    assert fleet.pool.num_incompatible == 2 * (NUM_INSTANCES // 2 - 1)


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


def test_a_model_that_comes_later_is_found():
    fleet = Fleet(NUM_INSTANCES)
    wanted = RequestCost(model="late")
    # Somebody says that nobody has it.
    assert fleet.take(Role.DECODE, cost=wanted)
    fleet.pool.introduce(fleet.decode[7], structs.replace(OURS, models=("late",)))
    assert {fleet.take(Role.DECODE, cost=wanted) for _ in range(5)} == {fleet.decode[7]}


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
        Candidates({each: InstanceState(each, Origin.FILE, 0.0) for each in order}).group(Wanted(Role.PREFILL))
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


def test_names_of_models_that_clients_make_up_make_no_groups():
    fleet = Fleet(4)
    for number in range(100):
        fleet.take(Role.DECODE, cost=RequestCost(model=str(number)))
    assert len(fleet.pool._queries._candidates._groups) < 8


@pytest.mark.parametrize("cost", [PROMPT, RequestCost(1000, 100, is_divisible=False)], ids=["alone", "indivisible"])
def test_what_decode_serves_alone_is_no_more_work_either(monkeypatch, cost):
    fleet, looks, load = Fleet(4000), [], InstanceState.load
    monkeypatch.setattr(InstanceState, "load", lambda state, *rest: looks.append(state) or load(state, *rest))
    for _ in range(2):
        looks.clear()
        assert isinstance(fleet.pool.reserve(InstanceRequest(Role.DECODE, cost, alone=True)), Reservation)
    assert len(looks) <= 2 * MAX_OFFERED


@pytest.mark.parametrize("num_instances", [8, NUM_INSTANCES])
@pytest.mark.parametrize("cost", [PROMPT, RequestCost(1000, 100, is_divisible=False)], ids=["alone", "indivisible"])
def test_without_prefill_only_those_serve_that_compute_prompts(num_instances, cost):
    fleet = Fleet(num_instances)
    fleet.only(fleet.prefill)
    computing = set(fleet.decode[: len(fleet.decode) // 2])
    for instance in fleet.decode:
        if instance not in computing:
            fleet.pool.introduce(instance, structs.replace(OURS, computes_prompts=False))
    requests = (InstanceRequest(Role.DECODE, cost, alone=cost.is_divisible) for _ in range(len(fleet.decode)))
    assert {fleet.pool.reserve(request).instance for request in requests} <= computing


def test_one_that_computes_prompts_and_is_down_is_waited_for_only_where_no_other_can_serve():
    fleet = Fleet(8)
    other = fleet.decode[1]
    for instance in fleet.decode[1:]:
        fleet.pool.introduce(instance, structs.replace(OURS, computes_prompts=False))
    fleet.only(fleet.decode, other)
    assert fleet.pool.reserve(InstanceRequest(Role.DECODE, PROMPT, alone=True)).instance == other
    indivisible = RequestCost(1000, 100, is_divisible=False)
    assert fleet.pool.reserve(InstanceRequest(Role.DECODE, indivisible)) == NoInstance()


def test_a_conversation_goes_on_where_it_was():
    """All of them begin with the same words of the system."""
    fleet = Fleet(NUM_INSTANCES)

    def ask(*prefixes):
        cost = RequestCost(1000, 100, prefixes, prefix_tokens=256)
        return fleet.pool.reserve(InstanceRequest(Role.PREFILL, cost, partners=(fleet.decode[0],)))

    # All at once, so that the beginning that they share spreads.
    first = [ask(1, 1000 + number) for number in range(100)]
    for number, reservation in enumerate(first):
        fleet.pool.prefixes.remember(reservation.instance, (1, 1000 + number))
        reservation.release()
    assert len({reservation.instance for reservation in first}) > 20
    for number, reservation in enumerate(first):
        again = ask(1, 1000 + number, 5000 + number)
        again.release()
        assert again.instance == reservation.instance


@pytest.mark.parametrize("share", [0.9, 0.97])
def test_a_fleet_that_is_nearly_full_is_not_full(share):
    fleet = Fleet(2 * NUM_INSTANCES)
    settings = PolicySettings(fleet._asked, Limits(max_requests=1), clock=lambda: 100.0, seed=1)
    fleet.pool._policy_settings = fleet.pool._queries._settings = settings
    for state in [state for state in fleet.pool.states if state.instance.role is Role.DECODE][: int(share * 1000)]:
        state.num_outstanding = 1
    refused = 0
    for _ in range(100):
        found = fleet.pool.reserve(InstanceRequest(Role.DECODE, PROMPT))
        refused += not isinstance(found, Reservation)
        if isinstance(found, Reservation):
            found.release()
    assert refused <= 2


def test_a_small_fleet_that_is_full_is_asked_about_once():
    fleet = Fleet(4)
    settings = PolicySettings(fleet._asked, Limits(max_requests=1), clock=lambda: 100.0)
    fleet.pool._policy_settings = fleet.pool._queries._settings = settings
    for state in fleet.pool.states:
        state.num_outstanding = 1
    assert isinstance(fleet.pool.reserve(InstanceRequest(Role.DECODE, PROMPT)), Overloaded)
    assert len(fleet.queries) == 1


def test_pairs_are_counted_as_if_each_was_looked_at():
    dice, fleet = random.Random(5), Fleet(40)
    for instance in fleet.pool.instances:
        kind = EngineInfo("kvferry", "1", dice.choice("89"), models=("m",), cache=dice.choice("ab"))
        fleet.pool.introduce(instance, kind)
        fleet.pool.probed(instance, dice.choice([ProbeResult.READY, ProbeResult.DOWN]), "")
    for _ in range(60):
        pair = dice.choice(fleet.prefill), dice.choice(fleet.decode)
        for _ in range(dice.choice([1, PAIR_BREAKER.num_failures])):
            fleet.pool.lost(pair, "digest", None)
    ready = {state.instance: state.kind for state in fleet.pool.states if state.ready}
    pairs = [(p, d) for p in ready for d in ready if (p.role, d.role) == (Role.PREFILL, Role.DECODE)]
    usable = [pair for pair in pairs if not differences(*(ready[one] for one in pair))]
    usable = [pair for pair in usable if fleet.pool.pairs.may_begin(pair, 100.0)]
    assert 0 < len(usable) < len(pairs)
    assert fleet.pool.num_usable_pairs() == len(usable)


def test_pairs_that_have_failed_once_are_not_looked_at_and_not_kept_for_ever():
    table = BreakerTable(PAIR_BREAKER, max_keys=100)
    for number in range(300):
        table.failed(("p", number), 0.0)
    assert (table.not_closed(0.0), len(table)) == ([], 100)
    assert table._opened == {}
    for _ in range(PAIR_BREAKER.num_failures):
        table.failed(("p", 1), 0.0)
    assert table.not_closed(0.0) == [("p", 1)]
    for number in range(300, 500):
        table.failed(("p", number), 0.0)
    assert (table.not_closed(0.0), table._opened) == ([], {})


def test_engines_that_were_started_again_are_of_one_kind():
    """Kinds are compared with one another: there must be few."""
    assert structs.replace(OURS, epoch="1").kind == structs.replace(OURS, epoch="2").kind


def test_kinds_of_engines_that_have_gone_are_forgotten_and_those_of_one_role_are_not_compared(caplog):
    caplog.set_level(logging.DEBUG)
    fleet = Fleet(4)
    for number in range(20):
        fleet.pool.introduce(fleet.decode[0], EngineInfo("kvferry", str(number), "9", models=("m",), cache="c"))
    assert len(fleet.pool._queries.kinds) == 3
    assert "never paired" not in caplog.text
    caplog.clear()
    fleet.pool.introduce(fleet.decode[0], EngineInfo("kvferry", "1", "10", models=("m",), cache="c"))
    (record,) = [record for record in caplog.records if "never paired" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().count("http://") == 3


def test_very_many_that_are_never_paired_are_one_short_line(caplog):
    fleet = Fleet(20)
    caplog.set_level(logging.DEBUG)
    fleet.pool.introduce(fleet.decode[0], structs.replace(OURS, wire_version="10"))
    (line,) = [record.getMessage() for record in caplog.records if "never paired" in record.getMessage()]
    assert line.count("http://") == 4
    assert "and 7 more are never paired" in line


def test_what_has_not_said_who_it_is_is_no_warning(caplog):
    fleet = Fleet(4)
    in_rooms = EngineInfo("sglang", handover=Handover.ROOM, bootstrap_host="10.0.0.1", bootstrap_port=8998)
    fleet.pool.introduce(fleet.prefill[0], in_rooms)
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    fleet.pool.add(Instance("http://new", Role.DECODE), Origin.REGISTERED)
    (record,) = [record for record in caplog.records if "never paired" in record.getMessage()]
    assert record.levelno == logging.DEBUG


def test_of_very_many_pairs_that_fail_few_are_remembered(monkeypatch):
    monkeypatch.setattr(instance_pool, "MAX_PAIRS", 3)
    fleet = Fleet(10)
    for prefill, decode in zip(fleet.prefill, fleet.decode, strict=True):
        fleet.pool.lost((prefill, decode), "transport", None)
    assert len(fleet.pool.pairs) == 3


def test_one_that_wants_no_requests_is_no_partner():
    fleet = Fleet(4)
    fleet.only(fleet.prefill, result=ProbeResult.UNREADY)
    fleet.take(Role.DECODE)
    assert {load.num_partners for load in fleet.queries[-1].candidates} == {0}


def test_an_instance_that_fails_is_no_partner():
    fleet = Fleet(4)
    for prefill in fleet.prefill:
        reservations = [fleet.pool.reserve(InstanceRequest(Role.PREFILL, PROMPT)) for _ in range(20)]
        for reservation in reservations:
            if reservation.instance == prefill:
                reservation.failed()
            reservation.release()
    assert not fleet.pool.ready(Role.PREFILL)
    fleet.take(Role.DECODE)
    assert {load.num_partners for load in fleet.queries[-1].decode} == {0}


def test_a_partner_that_has_left_or_failed_is_not_told_of():
    fleet = Fleet(4)
    decode = fleet.decode[0]
    excluded = InstanceRequest(Role.PREFILL, PROMPT, frozenset([decode]), (decode,))
    fleet.pool.reserve(excluded)
    assert fleet.queries[-1].decode == ()
    fleet.pool.remove(decode, Origin.COMMAND_LINE)
    assert fleet.take(Role.PREFILL, decode)
    assert fleet.queries[-1].decode == ()


def test_an_engine_of_another_kind_in_a_room_is_paired_one_way_alone():
    """Prefill has to be found by decode: the order of the two decides."""
    room = EngineInfo("sglang", "1", "9", models=("m",), cache="c", handover=Handover.ROOM, bootstrap_port=8998)
    meets = structs.replace(OURS, meets_in_rooms=True)
    fleet = Fleet(4)
    fleet.pool.introduce(fleet.prefill[0], room)
    fleet.pool.introduce(fleet.decode[0], meets)
    fleet.only(fleet.prefill, fleet.prefill[0])
    assert fleet.take(Role.PREFILL, fleet.decode[0]) == fleet.prefill[0]
    fleet.pool.introduce(fleet.prefill[0], meets)
    fleet.pool.introduce(fleet.decode[0], room)
    assert fleet.take(Role.PREFILL, fleet.decode[0]) is None


def test_what_is_told_of_a_rollout_does_not_grow_with_the_square_of_the_instances():
    fleet = Fleet(400)
    later = EngineInfo("kvferry", "2", "10", models=("m",), cache="c")
    for instance in fleet.prefill:
        fleet.pool.introduce(instance, later)
    status = status_of(fleet.pool)
    assert status["num_incompatible_pairs"] == 200 * 200
    assert len(status["incompatible_pairs"]) == MAX_LISTED_PAIRS
    assert len(status["members"]) == 400


async def test_the_text_of_metrics_is_made_beside_the_loop(monkeypatch):
    """Of thousands of instances it takes tenths of a second."""
    threads, render = [], Metrics.render
    monkeypatch.setattr(Metrics, "render", lambda self: threads.append(threading.get_ident()) or render(self))
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        assert "kvferry_router_ready 1.0" in await c.metrics()
    assert threads != [threading.get_ident()]


async def test_who_asks_while_metrics_are_written_gets_the_same_text(monkeypatch):
    begun, waiting, goes_on, render, shield = [], [], threading.Event(), Metrics.render, asyncio.shield

    def slow(self):
        begun.append(1)
        assert goes_on.wait(DEADLINE_S)
        return render(self)

    def counted(task):
        waiting.append(task)
        return shield(task)

    monkeypatch.setattr(Metrics, "render", slow)
    monkeypatch.setattr(scrapes.asyncio, "shield", counted)
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        asking = [asyncio.create_task(c.metrics()) for _ in range(3)]
        while len(waiting) < len(asking):
            await asyncio.sleep(0)
        # Whoever leaves takes nothing along.
        asking.pop(0).cancel()
        goes_on.set()
        assert len(set(await asyncio.gather(*asking))) == 1
        assert len(begun) == 1
        assert "kvferry_router_ready" in await c.metrics()
        assert len(begun) == 2


def test_the_text_of_metrics_has_pauses_and_is_the_same_as_without(monkeypatch):
    fleet, pauses = Fleet(200), []
    fleet.pool.show()
    monkeypatch.setattr(metrics.time, "sleep", pauses.append)
    text = fleet.metrics.render()
    assert text == generate_latest(fleet.metrics._registry)
    # As many gauges of instances.
    assert len(pauses) == 5 * (200 // metrics.PIECE)
