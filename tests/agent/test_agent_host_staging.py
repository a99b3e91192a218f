"""Devices whose memory no transport can register: everything goes through staging memory in the host."""

import queue
from dataclasses import replace

import agent_support
import pytest
from engines import oracle
from host_devices import FAR_ADDRESS, FarDevice, far_mover

from kvferry import Agent, AgentConfig, Cache, new_lease_id
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.target.read_strategy import AUTO, StagingPolicy
from kvferry.session.timeouts import Timing
from kvferry.transport.registry import open_transports

MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TABLES = {"p0": ((3, 9, 1, 15, 0, 7),), "d0": ((8, 0, 5, 2, 11, 4),)}
NUM_TOKENS = 21
# Generous: a busy machine must not be taken for a lost peer.
TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=20.0)
DEADLINE_S = 30.0
POLICY = StagingPolicy(AUTO, 5 * MODEL.bytes_per_token)


class FarRank:
    """An engine whose cache lies on a far device, and in whose process nothing of it is ever seen."""

    def __init__(self, name, address, transport="tcp", **config):
        num_bytes = sum(region.size_bytes for region in describe(MODEL, SHAPE, 0)[0].regions)
        self.name, self.device = name, FarDevice(num_bytes, address)
        (layout,) = describe(MODEL, SHAPE, address)
        self.layout = replace(layout, regions=tuple(replace(region, kind="far") for region in layout.regions))
        self.device.contents[:] = oracle.POISON
        buffers = {
            region.address: self.device.contents[region.address - address :][: region.size_bytes]
            for region in self.layout.regions
        }
        self.memory, self.notices = oracle.Memory(self.layout, buffers), queue.SimpleQueue()
        opened = open_transports(transport)
        cache = Cache((self.layout,), (), lambda near, notify: far_mover(self.device, near, notify))
        agent_config = AgentConfig(name, transport=transport, timing=TIMING, **{"staging": POLICY, **config})
        self.agent = Agent(agent_config, cache, self.notices.put, opened.transports, opened.unavailable)
        self.agent.start()

    def leased(self):
        oracle.fill(self.memory, TABLES["p0"], TokenRange(0, NUM_TOKENS))
        return self.agent.lease(LeaseRequest("r1", new_lease_id(), TABLES["p0"], NUM_TOKENS))

    def fetch(self, source, reference):
        ranges = (TokenRange(0, NUM_TOKENS),)
        self.agent.fetch(FetchRequest("q1", reference, (source.agent.address,), TABLES["d0"], ranges))

    def next_notice(self, kind):
        notice = self.notices.get(timeout=DEADLINE_S)
        assert isinstance(notice, kind), notice
        return notice

    def check(self):
        agent_support.check(self, NUM_TOKENS, TABLES["d0"])


@pytest.fixture
def make_far():
    made = []

    def make(name, **config):
        made.append(FarRank(name, FAR_ADDRESS + len(made) * (1 << 40), **config))
        return made[-1]

    yield make
    for rank in made:
        rank.agent.close()


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp", "nixl"])
def test_both_engines_are_far(make_far, transport):
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    source, target = make_far("p0", transport=transport), make_far("d0", transport=transport)
    target.fetch(source, source.leased())
    report = target.next_notice(Fetched).report
    target.check()
    assert (report.strategy, report.transport, report.verified) == ("pack", transport, "unreadable")
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")
    assert source.agent.num_slots == target.agent.num_slots == 0


def test_staging_memory_is_no_mirror_of_what_goes_through_it(make_far):
    """Room for two slots each way, and a request that is larger, in a cache that is larger still."""
    source, target = (make_far(name, staging_bytes=4 << 12) for name in ("p0", "d0"))
    assert 2 << 12 < NUM_TOKENS * MODEL.bytes_per_token < 4 << 12 < len(source.device.contents)
    target.fetch(source, source.leased())
    assert target.next_notice(Fetched).report.num_bytes == NUM_TOKENS * MODEL.bytes_per_token
    target.check()


@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
def test_only_the_target_is_far(make_far, make_rank, strategy):
    near = make_rank("p0", SHAPE, "tcp")
    target = make_far("d0", staging=StagingPolicy((strategy,), POLICY.slot_bytes))
    oracle.fill(near.memory, TABLES["p0"], TokenRange(0, NUM_TOKENS))
    reference = near.agent.lease(LeaseRequest("r1", new_lease_id(), TABLES["p0"], NUM_TOKENS))
    target.fetch(near, reference)
    assert target.next_notice(Fetched).report.strategy == strategy
    target.check()


@pytest.mark.parametrize("direction", Direction)
def test_only_the_source_is_far(make_far, make_rank, direction):
    source, near = make_far("p0"), make_rank("d0", SHAPE, "tcp", direction=direction)
    near.agent.fetch(near.wanted(source, source.leased(), TABLES["d0"], NUM_TOKENS))
    assert near.next_notice(Fetched).report.strategy == "pack"
    agent_support.check(near, tables=TABLES["d0"])
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")


def test_a_far_source_cannot_be_read_straight(make_far, make_rank):
    source = make_far("p0")
    near = make_rank("d0", SHAPE, "tcp", staging=StagingPolicy((Strategy.DIRECT,), 0))
    near.agent.fetch(near.wanted(source, source.leased(), TABLES["d0"], NUM_TOKENS))
    assert "only be reached through its staging memory" in str(near.next_notice(FetchFailed).error)
    near.next_notice(BlocksReleased)


def test_an_engine_that_is_far_cannot_be_set_up_to_move_straight(make_far):
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        make_far("p0", staging=StagingPolicy((Strategy.DIRECT,), 0))


def test_a_full_digest_of_what_the_processor_cannot_read_is_refused(make_far):
    source, target = make_far("p0"), make_far("d0", digest=DigestPolicy.FULL)
    target.fetch(source, source.leased())
    assert "memory that the CPU can read" in str(target.next_notice(FetchFailed).error)
    target.next_notice(BlocksReleased)
