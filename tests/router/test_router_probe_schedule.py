"""Whom the router probes and when: of a thousand instances never all at once, and after an event only whom it concerns.

Work is counted, on a schedule without a clock and on a prober whose connections are all refused, or hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter

import pytest

from kvferry.router.config import RouterConfig
from kvferry.router.fleet import probes
from kvferry.router.fleet.instance import Origin, ProbeResult
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.probe_schedule import AT_ONCE, ProbeSchedule
from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.metrics import Metrics

DEADLINE_S = 30.0
NEVER_S = 3600.0
FLEET = [Instance(f"http://d{number}", Role.DECODE) for number in range(1000)]


class Refusing:
    """In place of the client: whom it was to ask. Those that hang do not even refuse."""

    def __init__(self, *hanging: Instance) -> None:
        self.asked: Counter[str] = Counter()
        self._hanging = {instance.url for instance in hanging}

    async def send(self, request):
        self.asked[request.base] += 1
        if request.base in self._hanging:
            await asyncio.Event().wait()
        raise ConnectionRefusedError


@contextlib.asynccontextmanager
async def probing(http, instances, interval_s=NEVER_S):
    """A pool whose instances have all been probed once, and a prober that runs."""
    pool = InstancePool(instances, Metrics())
    pool.probe_requests.take()
    prober = probes.Prober(http, pool, RouterConfig((), ("http://d",), probe_interval_s=interval_s))
    task = asyncio.create_task(prober.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield pool
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


async def some_turns_of_the_loop() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_who_is_due_is_taken_in_order_and_once():
    schedule = ProbeSchedule()
    for due_s, instance in zip((3.0, 1.0, 2.0, 9.0, AT_ONCE), FLEET, strict=False):
        schedule.put(instance, due_s)
    assert schedule.next_s == AT_ONCE
    assert schedule.take(3.0, 2) == [FLEET[4], FLEET[1]]
    assert schedule.take(3.0, 9) == [FLEET[2], FLEET[0]]
    assert schedule.take(3.0, 9) == []
    assert schedule.next_s == 9.0


def test_of_two_times_the_earlier_one_is_kept():
    schedule = ProbeSchedule()
    for due_s in (5.0, 1.0, 7.0):
        schedule.put(FLEET[0], due_s)
    assert schedule.take(1.0, 9) == [FLEET[0]]
    assert schedule.take(9.0, 9) == []
    assert schedule.next_s == math.inf


def test_a_time_that_was_given_up_is_no_time():
    schedule = ProbeSchedule()
    schedule.put(FLEET[0], 5.0)
    schedule.put(FLEET[0], 1.0)
    assert schedule.take(1.0, 9) == [FLEET[0]]
    schedule.put(FLEET[0], 9.0)
    assert schedule.take(6.0, 9) == []
    assert schedule.take(9.0, 9) == [FLEET[0]]


@contextlib.contextmanager
def still_asking(prober, *instances):
    """Whoever a prober asks after this ends with it."""
    prober._under_way = {instance: asyncio.create_task(asyncio.sleep(NEVER_S)) for instance in instances}
    yield
    for task in prober._under_way.values():
        task.cancel()


async def test_a_doubt_that_comes_while_one_is_asked_is_not_forgotten():
    pool = InstancePool((), Metrics())
    pool.add(FLEET[0], Origin.REGISTERED, NEVER_S)
    prober = probes.Prober(Refusing(), pool, RouterConfig((), ("http://d",), probe_interval_s=NEVER_S))
    with still_asking(prober, FLEET[0]):
        prober._begin_some()
        assert prober._schedule.next_s < math.inf


async def test_however_many_are_found_down_all_are_hurried_once_in_an_interval():
    pool = InstancePool((), Metrics())
    for instance in FLEET[:8]:
        pool.add(instance, Origin.REGISTERED, NEVER_S)
    pool.probe_requests.take()
    prober = probes.Prober(Refusing(), pool, RouterConfig((), ("http://d",), probe_interval_s=NEVER_S))
    with still_asking(prober):
        for _ in range(2):
            pool.probe_requests.add_all()
            prober._begin_some()
            assert list(prober._under_way) == FLEET[:8]
            # Only of a second round would they have a time again.
            assert prober._schedule.next_s == math.inf


async def test_of_many_that_are_new_only_some_are_asked_in_a_turn(monkeypatch):
    monkeypatch.setattr(probes, "TURN_S", NEVER_S)
    http = Refusing()
    async with probing(http, ()) as pool:
        for instance in FLEET:
            pool.add(instance, Origin.REGISTERED, NEVER_S)
        await until(lambda: http.asked)
        await some_turns_of_the_loop()
        assert http.asked.total() == probes.PROBES_PER_TURN


async def test_those_that_are_still_asked_take_nobodys_turn():
    """A rack that hangs, while requests doubt it again and again, holds up no probe of the others."""
    hanging, others = FLEET[:50], FLEET[50:80]
    pool = InstancePool((), Metrics())
    for instance in (*hanging, *others):
        pool.add(instance, Origin.REGISTERED, NEVER_S)
    prober = probes.Prober(Refusing(), pool, RouterConfig((), ("http://d",), probe_interval_s=NEVER_S))
    with still_asking(prober, *hanging):
        prober._begin_some()
        assert list(prober._under_way)[len(hanging) :] == others[: probes.PROBES_PER_TURN]


async def test_a_storm_of_registrations_asks_each_instance_once(monkeypatch):
    monkeypatch.setattr(probes, "TURN_S", 0.0)
    http = Refusing()
    async with probing(http, ()) as pool:
        for instance in FLEET:
            pool.add(instance, Origin.REGISTERED, NEVER_S)
            await asyncio.sleep(0)
        await until(lambda: len(http.asked) == len(FLEET))
        await some_turns_of_the_loop()
        assert set(http.asked.values()) == {1}


async def test_a_doubt_about_one_instance_asks_that_one_alone():
    http = Refusing()
    async with probing(http, FLEET) as pool:
        pool.request_probe(FLEET[7])
        await until(lambda: http.asked)
        await some_turns_of_the_loop()
        assert http.asked == {FLEET[7].url: 1}


async def test_one_that_is_down_has_all_others_asked_once(monkeypatch):
    """As when the host of several has ended."""
    monkeypatch.setattr(probes, "TURN_S", 0.0)
    http = Refusing()
    async with probing(http, FLEET) as pool:
        for instance in FLEET:
            pool.probed(instance, ProbeResult.READY, "")
        pool.mark_down(FLEET[7], "refused")
        await until(lambda: len(http.asked) == len(FLEET))
        assert next(iter(http.asked)) == FLEET[7].url
        await until(lambda: not pool.healthy(Role.DECODE))
        await some_turns_of_the_loop()
        assert set(http.asked.values()) == {1}


async def test_however_often_traffic_doubts_an_instance_its_probes_have_a_pause(monkeypatch):
    monkeypatch.setattr(probes, "SHORTEST_PAUSE_S", NEVER_S)
    monkeypatch.setattr(probes, "TURN_S", 0.0)
    http = Refusing()
    async with probing(http, FLEET[:1]) as pool:
        for _ in range(100):
            pool.request_probe(FLEET[0])
            await asyncio.sleep(0)
        assert http.asked == {FLEET[0].url: 1}


async def test_one_that_is_doubted_while_it_is_asked_is_asked_again(monkeypatch):
    monkeypatch.setattr(probes, "SHORTEST_PAUSE_S", 0.01)
    http = Refusing()
    async with probing(http, FLEET[:1]) as pool:
        pool.request_probe(FLEET[0])
        await until(lambda: http.asked)
        pool.request_probe(FLEET[0])
        await until(lambda: http.asked[FLEET[0].url] == 2)


async def test_one_that_does_not_answer_holds_up_nobody():
    http = Refusing(FLEET[0])
    async with probing(http, FLEET[:2], interval_s=0.01) as pool:
        await until(lambda: http.asked[FLEET[0].url] == 1)
        await until(lambda: http.asked[FLEET[1].url] > 2)
        pool.add(FLEET[2], Origin.FILE)
        await until(lambda: http.asked[FLEET[2].url])
        assert http.asked[FLEET[0].url] == 1


async def test_one_that_has_left_is_asked_no_more(monkeypatch):
    monkeypatch.setattr(probes, "SHORTEST_PAUSE_S", 0.0)
    http = Refusing()
    async with probing(http, FLEET[:2], interval_s=0.01) as pool:
        pool.remove(FLEET[0], Origin.COMMAND_LINE)
        await until(lambda: http.asked[FLEET[1].url] > 5)
        before = http.asked[FLEET[0].url]
        await until(lambda: http.asked[FLEET[1].url] > 10)
        assert http.asked[FLEET[0].url] == before
        assert pool.probed_state(FLEET[0]) is None


@pytest.mark.parametrize("num_instances", [1, 100])
async def test_what_is_asked_grows_with_the_instances_alone(monkeypatch, num_instances):
    monkeypatch.setattr(probes, "SHORTEST_PAUSE_S", 0.0)
    http = Refusing()
    async with probing(http, FLEET[:num_instances], interval_s=0.2):
        await until(lambda: min(http.asked[one.url] for one in FLEET[:num_instances]) == 3)
        # Each at its own time: nobody much more often than the others.
        assert max(http.asked.values()) <= 6
