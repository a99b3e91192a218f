"""Staging memory on a device that transports reach: what is packed and scattered there, no processor sees."""

import queue
from dataclasses import dataclass, replace

import agent_support
import numpy as np
import pytest
from agent_support import Gate
from engines import oracle
from host_devices import FAR_ADDRESS, DeviceMemory, DeviceTransport, device_mover

from kvferry import Agent, AgentConfig, Cache, new_lease_id
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Fetched, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.timeouts import Timing
from kvferry.transport import memory_kind
from kvferry.transport.memory_kind import MemoryKind, register_kind
from kvferry.transport.registry import open_transports

DEVICE = "abacus"
MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
SHAPES = {
    "p0": EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major"),
    "d0": EngineShape(1, 1, block_tokens=6, num_blocks=9, format="block-head-major"),
}
TABLES = {"p0": ((3, 9, 1, 15, 0, 7),), "d0": ((8, 0, 5, 2),)}
NUM_TOKENS = 21
TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=20.0)
STAGING_BYTES = 1 << 20
DEADLINE_S = 30.0


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
class DeviceRank:
    """An engine whose cache lies on the device, like its staging memory: the two memories that `made` has, in turn."""

    agent: Agent
    memory: oracle.Memory
    notices: queue.SimpleQueue
    cache: DeviceMemory
    made: list[DeviceMemory]
    kinds: list[str]

    def leased(self, request_id="r1"):
        oracle.fill(self.memory, TABLES["p0"], TokenRange(0, NUM_TOKENS))
        return self.agent.lease(LeaseRequest(request_id, new_lease_id(), TABLES["p0"], NUM_TOKENS))

    def fetch(self, source, reference, request_id="q1"):
        ranges = (TokenRange(0, NUM_TOKENS),)
        self.agent.fetch(FetchRequest(request_id, reference, (source.agent.address,), TABLES["d0"], ranges))

    def next_notice(self, kind):
        notice = self.notices.get(timeout=DEADLINE_S)
        assert isinstance(notice, kind), notice
        return notice


@pytest.fixture
def make_rank(monkeypatch):
    monkeypatch.setattr(memory_kind, "KINDS", dict(memory_kind.KINDS))
    register_kind(DEVICE, MemoryKind.VRAM)
    ranks = []

    def make(name, strategy, transport="cma", wrap=lambda each: each):
        size_bytes = sum(region.size_bytes for region in describe(MODEL, SHAPES[name], 0)[0].regions)
        cache, made, kinds, notices = DeviceMemory(size_bytes, DEVICE), [], [], queue.SimpleQueue()
        cache.contents[:] = oracle.POISON
        (layout,) = describe(MODEL, SHAPES[name], cache.memory.address)
        layout = replace(layout, regions=tuple(replace(region, kind=DEVICE) for region in layout.regions))
        starts = {region.address: region.address - cache.memory.address for region in layout.regions}
        buffers = {r.address: cache.contents[starts[r.address] :][: r.size_bytes] for r in layout.regions}

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
        ranks.append(DeviceRank(agent, oracle.Memory(layout, buffers), notices, cache, made, kinds))
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
@pytest.mark.parametrize("transport", ["cma", "tcp", "nixl"])
def test_bytes_stay_on_the_device_until_they_are_on_the_wire(make_rank, transport, strategy):
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    source, target = (make_rank(name, strategy, transport) for name in ("p0", "d0"))
    for number in (1, 2):
        target.fetch(source, source.leased(f"r{number}"), f"q{number}")
        report = target.next_notice(Fetched).report
        agent_support.check(target, NUM_TOKENS, TABLES["d0"])
        assert (report.strategy, report.transport, report.verified) == (strategy, transport, "unreadable")
        assert source.next_notice(LeaseEnded) == LeaseEnded(f"r{number}", "done")
    assert source.agent.num_slots == target.agent.num_slots == 0
    (arena,) = target.made
    assert arena.contents.any() == (strategy is not Strategy.DIRECT)
    assert (arena.memory.device, arena.memory.size_bytes) == (DEVICE, STAGING_BYTES)
    if transport == "nixl":
        # What the self-test moves lies in the host's memory, all else on the device.
        assert {*source.kinds, *target.kinds} == {"DRAM", "VRAM"}


# --- its end ---


@pytest.fixture
def kept(monkeypatch):
    """What stays for the life of the process."""
    memories = []
    monkeypatch.setattr("kvferry.transport.shm.shared_memory._kept", memories)
    yield memories
    memories.clear()


def sizes(kept):
    return [memory.memory.size_bytes for memory in kept]


def test_it_is_freed_when_nobody_can_write_to_it_any_more(kept, make_rank):
    source, target = (make_rank(name, Strategy.PACK) for name in ("p0", "d0"))
    target.fetch(source, source.leased())
    target.next_notice(Fetched)
    source.next_notice(LeaseEnded)
    for rank in (source, target):
        rank.agent.close()
        assert not len(rank.made[0].contents)
    # The probe may be among it: nobody says when testing is over.
    assert STAGING_BYTES not in sizes(kept)


def test_it_is_kept_while_a_source_may_still_write_to_it(kept, make_rank, tmp_path):
    gate = Gate(tmp_path / "gate")
    source, target = make_rank("p0", Strategy.PACK, wrap=gate.behind), make_rank("d0", Strategy.PACK)
    target.fetch(source, source.leased("first"), "first")
    target.next_notice(Fetched)
    source.next_notice(LeaseEnded)
    gate.shut()
    target.fetch(source, source.leased())
    gate.wait_for_post()
    target.agent.close()
    (arena,) = target.made
    assert STAGING_BYTES in sizes(kept)
    assert arena.memory.address - FAR_ADDRESS in [memory.memory.address for memory in kept]
    gate.open()


def test_no_digest_is_made_of_what_the_processor_cannot_read(make_rank):
    """A peer that asks for one all the same gets a refusal: looking would end the engine's process."""
    assert "region" in make_rank("p0", Strategy.PACK).agent._event_loop.digester._memory.unreadable
