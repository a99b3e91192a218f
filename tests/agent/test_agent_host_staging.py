"""Devices whose memory no transport can register: everything goes through staging memory in the host."""

import queue
from dataclasses import dataclass, replace

import pytest
from agent_support import MODEL, NIXL, NUM_TOKENS, SOURCE, TIMING, Rank, leased, moved, until_slots_are_free
from engines import oracle
from host_devices import FAR_ADDRESS, FarDevice, far_mover

from kvferry import Agent, AgentConfig, Cache
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import describe
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import BlocksReleased, FetchFailed
from kvferry.session.target.read_strategy import AUTO, StagingPolicy
from kvferry.transport.registry import open_transports

# Of targets, with blocks as large as those of the source.
TABLES = ((8, 0, 5, 2, 11, 4),)
POLICY = StagingPolicy(AUTO, 5 * MODEL.bytes_per_token)


@dataclass
class FarRank(Rank):
    """An engine whose cache lies on a far device, and in whose process nothing of it is ever seen."""

    device: FarDevice


@pytest.fixture
def make_far():
    made = []

    def make(name, transport="tcp", **config):
        address = FAR_ADDRESS + len(made) * (1 << 40)
        (layout,) = describe(MODEL, SOURCE, address)
        device = FarDevice(sum(region.size_bytes for region in layout.regions), address)
        layout = replace(layout, regions=tuple(replace(region, kind="far") for region in layout.regions))
        memory = oracle.Memory.poisoned_at(layout, device.contents, address)
        opened, notices = open_transports(transport), queue.SimpleQueue()
        cache = Cache((layout,), (), lambda near, notify: far_mover(device, near, notify))
        agent_config = AgentConfig(name, transport=transport, timing=TIMING, **{"staging": POLICY, **config})
        agent = Agent(agent_config, cache, notices.put, opened.transports, opened.unavailable)
        agent.start()
        made.append(FarRank(agent, memory, notices, device))
        return made[-1]

    yield make
    for rank in made:
        rank.agent.close()


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp", NIXL])
@pytest.mark.slow
def test_both_engines_are_far(make_far, transport):
    source, target = make_far("p0", transport=transport), make_far("d0", transport=transport)
    report = moved(source, target, tables=TABLES)
    assert (report.strategy, report.transport, report.verified) == ("pack", transport, "unreadable")
    until_slots_are_free(source, target)


def test_staging_memory_is_no_mirror_of_what_goes_through_it(make_far):
    """Room for two slots each way, and a request that is larger, in a cache that is larger still."""
    source, target = (make_far(name, staging_bytes=4 << 12) for name in ("p0", "d0"))
    assert 2 << 12 < NUM_TOKENS * MODEL.bytes_per_token < 4 << 12 < len(source.device.contents)
    assert moved(source, target, tables=TABLES).num_bytes == NUM_TOKENS * MODEL.bytes_per_token


@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
def test_only_the_target_is_far(make_far, make_rank, strategy):
    near = make_rank("p0", SOURCE, "tcp")
    target = make_far("d0", staging=StagingPolicy((strategy,), POLICY.slot_bytes))
    assert moved(near, target, tables=TABLES).strategy == strategy


@pytest.mark.parametrize("direction", Direction)
def test_only_the_source_is_far(make_far, make_rank, direction):
    source, near = make_far("p0"), make_rank("d0", SOURCE, "tcp", direction=direction)
    assert moved(source, near, tables=TABLES).strategy == "pack"


def test_a_far_source_cannot_be_read_straight(make_far, make_rank):
    source = make_far("p0")
    near = make_rank("d0", SOURCE, "tcp", staging=StagingPolicy((Strategy.DIRECT,), 0))
    near.fetch(source, leased(source), tables=TABLES)
    assert "only be reached through its staging memory" in str(near.next_notice(FetchFailed).error)
    near.next_notice(BlocksReleased)


def test_an_engine_that_is_far_cannot_be_set_up_to_move_straight(make_far):
    with pytest.raises(ConfigurationError, match="cannot be registered"):
        make_far("p0", staging=StagingPolicy((Strategy.DIRECT,), 0))


def test_a_full_digest_of_what_the_processor_cannot_read_is_refused(make_far):
    source, target = make_far("p0"), make_far("d0", digest=DigestPolicy.FULL)
    target.fetch(source, leased(source), tables=TABLES)
    assert "memory that the CPU can read" in str(target.next_notice(FetchFailed).error)
    target.next_notice(BlocksReleased)
