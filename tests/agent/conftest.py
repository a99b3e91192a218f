import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from engines import oracle

from kvferry import Agent, AgentConfig, Cache, new_epoch
from kvferry.agent.cache import host_mover
from kvferry.agent.config import SLOT_BYTES
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.session.events import FetchRequest
from kvferry.session.timeouts import Timing
from kvferry.transport.registry import open_transports
from kvferry.transport.shm.shared_memory import allocate_shared

MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
# Generous where nothing is waited for, so that a busy machine is not taken for a lost peer.
TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=20.0)
DEADLINE_S = 30.0
# What a busy machine makes of a self-test must not decide who moves the bytes in a test. Every page of staging memory
# is taken at the start, which is most of what these tests would wait for.
FIXED = {"may_switch_direction": False, "staging_bytes": 4 * SLOT_BYTES}


@dataclass
class Rank:
    """A real agent over a cache that no engine computes: the oracle fills and checks it."""

    agent: Agent
    memory: oracle.Memory
    notices: queue.SimpleQueue

    def next_notice(self, kind):
        """The next notice, which must be of this kind."""
        notice = self.notices.get(timeout=DEADLINE_S)
        assert isinstance(notice, kind), notice
        return notice

    def wanted(self, source: "Rank", reference, tables, num_tokens, request_id="q1") -> FetchRequest:
        return FetchRequest(request_id, reference, (source.agent.address,), tables, (TokenRange(0, num_tokens),))


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    made, memories = [], []

    def make(
        engine_id: str,
        shape: EngineShape,
        transport: str = "shm",
        timing: Timing = TIMING,
        wrap=None,
        mover=host_mover,
        **config,
    ) -> Rank:
        size_bytes = sum(region.size_bytes for region in describe(MODEL, shape, 0)[0].regions)
        shared = allocate_shared(size_bytes, engine_id)
        memories.append(shared)
        (layout,) = describe(MODEL, shape, shared.memory.address)
        view = np.frombuffer(shared.buffer, np.uint8)
        view[:] = oracle.POISON
        starts = [region.address - shared.memory.address for region in layout.regions]
        buffers = {
            r.address: view[start : start + r.size_bytes] for r, start in zip(layout.regions, starts, strict=True)
        }
        notices: queue.SimpleQueue = queue.SimpleQueue()
        opened = open_transports(transport)
        cache = Cache((layout,), (shared.memory,), mover)
        transports = [wrap(each) for each in opened.transports] if wrap else opened.transports
        agent_config = AgentConfig(engine_id, transport=transport, timing=timing, **FIXED | config)
        agent = Agent(agent_config, cache, notices.put, transports, opened.unavailable)
        agent.start()
        made.append(agent)
        return Rank(agent, oracle.Memory(layout, buffers), notices)

    yield make
    for agent in made:
        agent.close()
    for shared in memories:
        shared.close()


def lying_at(shape, rank, address):
    """One rank's layout. `describe` puts the ranks of an engine far from one another."""
    shift = describe(MODEL, shape, 0)[rank].regions[0].address
    return describe(MODEL, shape, address - shift)[rank]


@pytest.fixture
def make_engine():
    """All ranks of an engine, each with its own memory and agent."""
    made, memories = [], []

    def make(engine_id, shape, direction=Direction.READ, wrap=None, mover=host_mover, **config):
        size_bytes = sum(region.size_bytes for region in describe(MODEL, shape, 0)[0].regions)
        shared = [allocate_shared(size_bytes, engine_id) for _ in range(shape.num_ranks)]
        memories.extend(shared)
        layouts = tuple(lying_at(shape, rank, each.memory.address) for rank, each in enumerate(shared))
        ranks, epoch = [], new_epoch()
        for rank, (layout, each) in enumerate(zip(layouts, shared, strict=True)):
            view = np.frombuffer(each.buffer, np.uint8)
            starts = [region.address - each.memory.address for region in layout.regions]
            view[:] = oracle.POISON
            parts = zip(layout.regions, starts, strict=True)
            buffers = {region.address: view[start : start + region.size_bytes] for region, start in parts}
            opened, notices = open_transports("shm"), queue.SimpleQueue()
            agent_config = AgentConfig(
                engine_id, epoch, rank, transport="shm", timing=TIMING, direction=direction, **FIXED | config
            )
            transports = [wrap(one) for one in opened.transports] if wrap else opened.transports
            agent = Agent(
                agent_config, Cache(layouts, (each.memory,), mover), notices.put, transports, opened.unavailable
            )
            agent.start()
            made.append(agent)
            ranks.append(Rank(agent, oracle.Memory(layout, buffers), notices))
        return ranks

    yield make
    for agent in made:
        agent.close()
    for each in memories:
        each.close()
