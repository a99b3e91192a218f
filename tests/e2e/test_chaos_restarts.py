"""One side is killed and started again, a hundred times: the other goes on as if nothing had been."""

import itertools
import time

import pytest
from process_engine import NUM_BLOCKS, ProcessEngine

pytestmark = pytest.mark.slow

NUM_RESTARTS = 100
WARM_UP = 10
# Over the most that was seen in the first rounds. It moves by some megabytes from round to round (what a transport is
# tested with, what waits to be collected); a leak of one peer's cache per restart would be twenty times this.
MAX_GROWTH_BYTES = 8 << 20
SHORT_LEASE_S = 2.0
names = (f"r{number}" for number in itertools.count())


def move(source, target, num_blocks=8):
    """One cache from one to the other, and every byte of it is right."""
    name = next(names)
    target.usage()  # It has started when it answers: a short lease must not run out before.
    offer = source.lease(name, num_blocks, seed=len(name))
    target.fetch(name, offer)
    told = target.notice(name, "fetched", "failed")
    assert told["notice"] == "fetched", told.get("error")
    assert told["digest"] == offer["digest"]


def expect_steady(early, after):
    """No more than the most of the first rounds."""
    before = {what: max(each[what] for each in early) for what in after}
    print(f"\nbefore {before}\nafter  {after}")
    assert after["free_blocks"] == NUM_BLOCKS
    assert after["fds"] <= before["fds"]
    assert after["threads"] <= before["threads"]
    assert after["memory_bytes"] <= before["memory_bytes"] + MAX_GROWTH_BYTES


def restarts(engine_id, transport, number):
    """So many incarnations of one engine, each killed when the next one is wanted; the next starts meanwhile."""
    following = ProcessEngine(engine_id, transport)
    try:
        for _ in range(number):
            with following as engine:
                following = ProcessEngine(engine_id, transport)
                yield engine
    finally:
        following.kill()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_target_outlives_a_few_sources(transport):
    with ProcessEngine("d0", transport) as target:
        for source in restarts("p0", transport, 3):
            move(source, target)
        assert target.usage()["free_blocks"] == NUM_BLOCKS


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_target_outlives_a_hundred_sources(transport):
    """Every other source dies with a cache that the target is about to fetch."""
    began, late, early = time.monotonic(), "", []
    with ProcessEngine("d0", transport) as target:
        for number, source in enumerate(restarts("p0", transport, WARM_UP + NUM_RESTARTS)):
            move(source, target)
            if late:
                assert target.notice(late, "failed")["reason"] == "peer_lost"
                target.notice(late, "free")
            if number < WARM_UP:
                early.append(target.usage())
            late = next(names) if number % 2 else ""
            if late:
                offer = source.lease(late, 8, seed=number)
                source.kill()
                target.fetch(late, offer)
        target.notice(late, "free")
        expect_steady(early, target.usage())
    print(f"{WARM_UP + NUM_RESTARTS} restarts over {transport} in {time.monotonic() - began:.1f} s")


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_source_outlives_a_hundred_targets(transport):
    """Every other target dies with a fetch under way: the source gets its blocks back when the lease runs out."""
    began, late, early = time.monotonic(), [], []
    with ProcessEngine("p0", transport, SHORT_LEASE_S) as source:
        for number, target in enumerate(restarts("d0", transport, WARM_UP + NUM_RESTARTS)):
            move(source, target)
            if number < WARM_UP:
                early.append(source.usage())
            if number % 2:
                late.append(next(names))
                target.fetch(late[-1], source.lease(late[-1], 8, seed=number))
                target.kill()
            if len(late) > 3:
                source.notice(late.pop(0), "free")
        for name in late:
            source.notice(name, "free")
        expect_steady(early, source.usage())
    print(f"{WARM_UP + NUM_RESTARTS} restarts over {transport} in {time.monotonic() - began:.1f} s")
