"""Staging memory on a device that transports reach: what is packed and scattered there, no processor sees."""

import queue
from dataclasses import dataclass, replace

import numpy as np
import pytest
from agent_support import MODEL, NIXL, SOURCE, TARGET, TIMING, Rank, moved, sizes, until_slots_are_free
from engines import oracle
from host_devices import FAR_ADDRESS, DeviceMemory, DeviceTransport, device_mover

from kvferry import Agent, AgentConfig, Cache
from kvferry.plan.description.describe import describe
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.transport import memory_kind
from kvferry.transport.memory_kind import MemoryKind, register_kind
from kvferry.transport.registry import open_transports

DEVICE = "abacus"
STAGING_BYTES = 1 << 20


class Pretending:
    """A NIXL agent to which memory of the device is the host's; `kinds` are those that rows were said to have."""

    def __init__(self, agent, kinds):
        self._agent, self._kinds = agent, kinds

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def register_memory(self, places, kind):
        lowered = [(start - FAR_ADDRESS * (kind == "VRAM"), *rest) for start, *rest in places]
        return self._agent.register_memory(lowered, "DRAM")

    def get_xfer_descs(self, rows, kind):
        self._kinds.append(kind)
        rows[:, 0] -= np.uint64(FAR_ADDRESS * (kind == "VRAM"))
        rows[:, 2] = 0
        return self._agent.get_xfer_descs(rows, "DRAM")


@dataclass
class DeviceRank(Rank):
    """An engine whose cache lies on the device, like its staging memory: the two memories that `made` has, in turn."""

    cache: DeviceMemory
    made: list[DeviceMemory]
    kinds: list[str]


@pytest.fixture
def make_rank(monkeypatch):
    monkeypatch.setattr(memory_kind, "KINDS", dict(memory_kind.KINDS))
    register_kind(DEVICE, MemoryKind.VRAM)
    ranks = []

    def make(name, strategy, transport="cma", wrap=lambda each: each):
        shape = {"p0": SOURCE, "d0": TARGET}[name]
        size_bytes = sum(region.size_bytes for region in describe(MODEL, shape, 0)[0].regions)
        cache, made, kinds, notices = DeviceMemory(size_bytes, DEVICE), [], [], queue.SimpleQueue()
        (layout,) = describe(MODEL, shape, cache.memory.address)
        layout = replace(layout, regions=tuple(replace(region, kind=DEVICE) for region in layout.regions))
        memory = oracle.Memory.poisoned_at(layout, cache.contents, cache.memory.address)

        def arena(num_bytes):
            made.append(DeviceMemory(num_bytes, DEVICE))
            return made[-1]

        def reached(each):
            if each.name != "nixl":
                return wrap(DeviceTransport(each))
            each._agent = Pretending(each._agent, kinds)
            return wrap(each)

        opened = open_transports(transport)
        engine_cache = Cache((layout,), (cache.memory,), device_mover, arena, DEVICE, DEVICE)
        policy = StagingPolicy((strategy,), 5 * MODEL.bytes_per_token)
        config = AgentConfig(
            name,
            transport=transport,
            timing=TIMING,
            may_switch_direction=False,
            staging=policy,
            staging_bytes=STAGING_BYTES,
        )
        agent = Agent(
            config, engine_cache, notices.put, [reached(each) for each in opened.transports], opened.unavailable
        )
        agent.start()
        ranks.append(DeviceRank(agent, memory, notices, cache, made, kinds))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.agent.close()
        rank.memory.buffers.clear()
        rank.cache.close(may_be_written=False)


def test_prices_are_those_of_the_memory_that_is_registered(make_rank):
    rank = make_rank("p0", Strategy.PACK)
    assert rank.agent._event_loop.transports._context.buffer_device == DEVICE


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("transport", ["cma", "tcp", NIXL])
def test_bytes_stay_on_the_device_until_they_are_on_the_wire(make_rank, transport, strategy):
    source, target = (make_rank(name, strategy, transport) for name in ("p0", "d0"))
    for number in (1, 2):
        report = moved(source, target, number)
        assert (report.strategy, report.transport, report.verified) == (strategy, transport, "unreadable")
    until_slots_are_free(source, target)
    (arena,) = target.made
    assert arena.contents.any() == (strategy is not Strategy.DIRECT)
    assert (arena.memory.device, arena.memory.size_bytes) == (DEVICE, STAGING_BYTES)
    if transport == "nixl":
        # What the self-test moves lies in the host's memory, all else on the device.
        assert {*source.kinds, *target.kinds} == {"DRAM", "VRAM"}


# --- its end ---


def test_it_is_freed_when_nobody_can_write_to_it_any_more(kept, make_rank):
    source, target = (make_rank(name, Strategy.PACK) for name in ("p0", "d0"))
    moved(source, target)
    for rank in (source, target):
        rank.agent.close()
        assert not len(rank.made[0].contents)
    # The probe may be among it: nobody says when testing is over.
    assert STAGING_BYTES not in sizes(kept)


def test_it_is_kept_while_a_source_may_still_write_to_it(kept, make_rank, gate):
    source, target = make_rank("p0", Strategy.PACK, wrap=gate.behind), make_rank("d0", Strategy.PACK)
    moved(source, target, 0)
    gate.hold(source, target)
    target.agent.close()
    (arena,) = target.made
    assert STAGING_BYTES in sizes(kept)
    assert arena.memory.address - FAR_ADDRESS in [memory.memory.address for memory in kept]
    gate.open()


def test_no_digest_is_made_of_what_the_processor_cannot_read(make_rank):
    """A peer that asks for one all the same gets a refusal: looking would end the engine's process."""
    assert "region" in make_rank("p0", Strategy.PACK).agent._event_loop.digester._memory.unreadable
