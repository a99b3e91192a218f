import queue
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from agent_support import MODEL, TIMING, Gate, Rank
from engines import oracle

from kvferry import Agent, AgentConfig, Cache, new_epoch
from kvferry.agent.cache import host_mover
from kvferry.agent.config import SLOT_BYTES
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.transport.registry import open_transports
from kvferry.transport.shm.shared_memory import allocate_shared

# What a busy machine makes of a self-test must not decide who moves the bytes in a test. Every page of staging memory
# is taken at the start, which is most of what these tests would wait for.
FIXED = {"timing": TIMING, "may_switch_direction": False, "staging_bytes": 4 * SLOT_BYTES}


def lying_at(shape, rank, address):
    """One rank's layout. `describe` puts the ranks of an engine far from one another."""
    shift = describe(MODEL, shape, 0)[rank].regions[0].address
    return describe(MODEL, shape, address - shift)[rank]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., list[Rank]]]:
    """Makes all ranks of an engine, each with its own memory and agent."""
    made, memories = [], []

    def make(
        engine_id: str, shape: EngineShape, transport: str = "shm", wrap=None, mover=host_mover, **config
    ) -> list[Rank]:
        size_bytes = sum(region.size_bytes for region in describe(MODEL, shape, 0)[0].regions)
        shared = [allocate_shared(size_bytes, engine_id) for _ in range(shape.num_ranks)]
        memories.extend(shared)
        layouts = tuple(lying_at(shape, rank, each.memory.address) for rank, each in enumerate(shared))
        ranks, epoch = [], new_epoch()
        for rank, (layout, each) in enumerate(zip(layouts, shared, strict=True)):
            memory = oracle.Memory.poisoned_at(layout, np.frombuffer(each.buffer, np.uint8), each.memory.address)
            opened, notices = open_transports(transport), queue.SimpleQueue()
            agent_config = AgentConfig(engine_id, epoch, rank, transport=transport, **FIXED | config)
            transports = [wrap(one) for one in opened.transports] if wrap else opened.transports
            cache = Cache(layouts, (each.memory,), mover)
            agent = Agent(agent_config, cache, notices.put, transports, opened.unavailable)
            agent.start()
            made.append(agent)
            ranks.append(Rank(agent, memory, notices))
        return ranks

    yield make
    for agent in made:
        agent.close()
    for each in memories:
        each.close()


@pytest.fixture
def make_rank(make_engine) -> Callable[..., Rank]:
    """Makes the only rank of an engine."""

    def make(*args, **options) -> Rank:
        (rank,) = make_engine(*args, **options)
        return rank

    return make


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def kept(monkeypatch):
    """Shared memory that stays for the life of the process."""
    memories = []
    monkeypatch.setattr("kvferry.transport.shm.shared_memory._kept", memories)
    yield memories
    memories.clear()
