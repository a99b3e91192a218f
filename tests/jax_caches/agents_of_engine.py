"""All ranks of an engine, each with a real agent, and what the oracle says of what they move."""

from __future__ import annotations

import queue
from typing import Any

from engines import oracle

from kvferry import Agent, AgentConfig, new_epoch, new_lease_id
from kvferry.agent.config import SLOT_BYTES
from kvferry.layout import CacheModel, attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.transport.registry import open_transports

TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=60.0)
DEADLINE_S = 60.0
NUM_TOKENS, NUM_HEADS, HEAD_DIM = 21, 12, 8
SOURCE_TABLE, TARGET_TABLE = (3, 9, 1, 15, 0, 7), (8, 0, 5, 2)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


def model_of(dtype: str, num_heads: int = NUM_HEADS) -> CacheModel:
    return attention(2, num_heads, HEAD_DIM, dtype, ITEM_BYTES[dtype])


class AgentsOfEngine:
    """The engine is a `JaxEngine` or a `TorchEngine`; its `pictures` are what the oracle fills and checks."""

    def __init__(self, engine_id: str, engine: Any) -> None:
        self.engine = engine
        self.table = SOURCE_TABLE if engine_id == "p0" else TARGET_TABLE
        self.notices: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in engine.layouts]
        self.agents, epoch = [], new_epoch()
        for rank, notices in enumerate(self.notices):
            opened = open_transports("shm")
            config = AgentConfig(engine_id, epoch, rank, transport="shm", timing=TIMING, staging_bytes=4 * SLOT_BYTES)
            self.agents.append(Agent(config, engine.cache(rank), notices.put, opened.transports, opened.unavailable))
            self.agents[-1].start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(agent.address for agent in self.agents)

    def lease(self) -> list[Any]:
        """The references to a cache that every rank has."""
        for picture in self.engine.pictures:
            oracle.fill(picture, (self.table,), TokenRange(0, NUM_TOKENS))
        self.engine.upload()
        lease_id = new_lease_id()
        return [agent.lease(LeaseRequest("r1", lease_id, (self.table,), NUM_TOKENS)) for agent in self.agents]

    def fetch(self, reference: Any, addresses: tuple[str, ...]) -> None:
        for agent in self.agents:
            agent.fetch(FetchRequest("q1", reference, addresses, (self.table,), (TokenRange(0, NUM_TOKENS),)))

    def heard(self, kind: type) -> list[Any]:
        """The next notice of every rank."""
        found = [notices.get(timeout=DEADLINE_S) for notices in self.notices]
        assert all(isinstance(notice, kind) for notice in found), found
        return found

    def check(self) -> None:
        """Every byte of the request is there, and no other was touched."""
        self.engine.download()
        for picture in self.engine.pictures:
            oracle.expect_tokens(picture, (self.table,), NUM_TOKENS)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.engine.close()
