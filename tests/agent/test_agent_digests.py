"""Digests between two real agents: a bit that a transport has flipped never reaches a model."""

import threading

import numpy as np
import pytest
from agent_support import SOURCE, TARGET, check, leased, moved
from faulty_transport import FaultKind, FaultyTransport

from kvferry.agent.memory.digests import STEP_BYTES, Digester, HostBytes
from kvferry.plan.description.layout import Region
from kvferry.plan.digests.bound_parts import Grid
from kvferry.plan.digests.extractor import Extract
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.target.read_strategy import NO_STAGING
from kvferry.transport.base import Memory


class Spoiling(FaultyTransport):
    """Asks `spoil` before each ticket. How many there are before a fetch is up to the self-test, and to its times."""

    def __init__(self, inner, spoil) -> None:
        super().__init__(inner)
        self._spoil = spoil

    def post(self, peer, copies, direction):
        self._spoil(self)
        return super().post(peer, copies, direction)


def once(spoil):
    """For the first ticket only."""
    left = [spoil]
    return lambda transport: left.pop()(transport) if left else None


def flip(transport):
    transport.spoil_next(FaultKind.FLIP, bit=12345)


@pytest.fixture
def make_spoiled(make_rank):
    """A source and a target that have met, and what makes `spoil` see the target's tickets from then on."""

    def make(spoil, **config):
        spoils = []

        def wrap(transport):
            return Spoiling(transport, lambda one: [each(one) for each in spoils])

        source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, wrap=wrap, staging=NO_STAGING, **config)
        moved(source, target, 0)
        return source, target, lambda: spoils.append(spoil)

    return make


@pytest.mark.parametrize("policy", list(DigestPolicy))
def test_the_report_says_how_a_cache_was_verified(make_rank, policy):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, digest=policy)
    assert moved(source, target).verified == policy


def test_a_flipped_bit_is_found_and_the_next_fetch_is_fine(make_spoiled):
    source, target, begin = make_spoiled(once(flip), digest=DigestPolicy.FULL)
    begin()
    target.fetch(source, leased(source))
    error = target.next_notice(FetchFailed).error
    assert error.reason == "digest"
    assert "1 of 4 states differ: model.layers." in str(error)
    target.next_notice(BlocksReleased)
    assert target.agent.counts["fetches_failed", "digest"] == 1
    assert source.next_notice(LeaseEnded).reason == "done"
    moved(source, target, 2)


def test_without_a_digest_nobody_notices(make_spoiled):
    """What the digest is for."""
    source, target, begin = make_spoiled(flip, digest=DigestPolicy.OFF)
    begin()
    target.fetch(source, leased(source))
    target.next_notice(Fetched)
    with pytest.raises(AssertionError):
        check(target)


def test_a_cache_that_its_engine_writes_to_too_early_is_found_by_a_sample(make_spoiled, monkeypatch):
    """The blocks of a lease hold another request's bytes by the time they are read: the source has looked before."""
    is_digested, run = threading.Event(), Digester.run

    def noted(self, max_bytes):
        found = run(self, max_bytes)
        if found:
            is_digested.set()
        return found

    def overwrite(transport):
        assert is_digested.wait(10)
        for buffer in source.memory.buffers.values():
            buffer[:] ^= 0xFF

    source, target, begin = make_spoiled(once(overwrite))
    monkeypatch.setattr(Digester, "run", noted)
    begin()
    target.fetch(source, leased(source))
    assert target.next_notice(FetchFailed).error.reason == "digest"


# --- reading memory ---


def region(memory, start, size_bytes):
    return Region(memory.ctypes.data + start, size_bytes, "dram", 0)


def host(memory, *regions):
    return HostBytes([Memory(memory.ctypes.data, memory.size, -1)], regions)


def extract_of(memory, item_bytes, items):
    starts = np.array([memory.ctypes.data], np.uint64)
    return Extract((0,), starts, np.array([items], np.uint64) * np.uint64(item_bytes), Grid(item_bytes, (), ()))


def test_a_region_that_nobody_registered_is_never_read():
    memory = np.zeros(64, np.uint8)
    digester = Digester(host(memory, region(memory, 0, 64), region(memory, 32, 64)))
    digester.start("key", [extract_of(memory, 4, range(4))])
    assert digester.busy
    (digested,) = digester.run(1)
    assert (digested.values, digester.busy) == ((), False)
    assert "a region is not registered memory" in digested.error


def test_long_digests_take_turns_and_short_ones_overtake_them():
    memory = np.arange(4 * STEP_BYTES, dtype=np.uint32).view(np.uint8)[: 4 * STEP_BYTES]
    digester = Digester(host(memory, region(memory, 0, memory.size)))
    for name, num_items in (("long", 4096), ("short", 1), ("dropped", 4096)):
        digester.start(name, [extract_of(memory, 1024, range(num_items))])
    digester.drop("dropped")
    digester.drop("unknown")
    turns = []
    while digester.busy:
        turns.append([digested.key for digested in digester.run(STEP_BYTES)])
    assert turns[1] == ["short"]
    assert [key for turn in turns for key in turn] == ["short", "long"]
    assert len(turns) >= 4


def test_a_digest_does_not_depend_on_how_it_is_cut():
    memory = np.random.default_rng(1).integers(0, 256, 3 * STEP_BYTES, np.uint8)
    digester = Digester(host(memory, region(memory, 0, memory.size)))
    sizes = 24, 1024, STEP_BYTES
    for size in sizes:
        digester.start(size, [extract_of(memory, size, range(memory.size // size))])
    values = {digested.key: digested.values for digested in digester.run(1 << 40)}
    assert len(set(values.values())) == 1
