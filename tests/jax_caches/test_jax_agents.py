"""Engines with arrays of JAX on several devices, engines with memory of the host, and real agents between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import oracle
from jax_engine import JaxEngine

from kvferry import Agent, AgentConfig, Cache, SharedMemory, allocate_shared, new_epoch, new_lease_id
from kvferry.agent.config import SLOT_BYTES
from kvferry.layout import EngineShape, attention, describe
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.transport.registry import open_transports

TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=60.0)
DEADLINE_S = 60.0
NUM_TOKENS, NUM_HEADS = 21, 12
SOURCE_TABLE, TARGET_TABLE = (3, 9, 1, 15, 0, 7), (8, 0, 5, 2)
# Blocks that no request has: the engine writes to them all the time.
OTHER_BLOCK = 4
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}


def model_of(dtype: str):
    return attention(2, NUM_HEADS, 8, dtype, np.dtype(DTYPES[dtype]).itemsize)


class Side:
    """All ranks of an engine, each with an agent. `pictures` are what the oracle fills and checks."""

    def __init__(self, engine_id: str, shape: EngineShape, dtype: str, is_jax: bool) -> None:
        self.table = (SOURCE_TABLE if engine_id == "p0" else TARGET_TABLE,)
        self._shared: list[SharedMemory] = []
        self.jax = JaxEngine(model_of(dtype), shape, DTYPES[dtype]) if is_jax else None
        if self.jax is not None:
            self.layouts, self.pictures = self.jax.layouts, self.jax.pictures
            caches = [self.jax.caches.cache(rank) for rank in range(len(self.layouts))]
        else:
            caches = self._in_host(engine_id, model_of(dtype), shape)
        self.notices: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in caches]
        self.agents, epoch = [], new_epoch()
        for rank, cache in enumerate(caches):
            opened = open_transports("shm")
            config = AgentConfig(engine_id, epoch, rank, transport="shm", timing=TIMING, staging_bytes=4 * SLOT_BYTES)
            self.agents.append(Agent(config, cache, self.notices[rank].put, opened.transports, opened.unavailable))
            self.agents[-1].start()

    def _in_host(self, engine_id: str, model, shape: EngineShape) -> list[Cache]:
        plain = describe(model, shape, 0)
        sizes = [sum(region.size_bytes for region in layout.regions) for layout in plain]
        self._shared = [allocate_shared(size, engine_id) for size in sizes]
        addresses = [each.memory.address for each in self._shared]
        moved = [describe(model, shape, at - plain[rank].regions[0].address) for rank, at in enumerate(addresses)]
        self.layouts = tuple(of_all[rank] for rank, of_all in enumerate(moved))
        self.pictures = [
            oracle.Memory.poisoned_at(layout, np.frombuffer(each.buffer, np.uint8), each.memory.address)
            for layout, each in zip(self.layouts, self._shared, strict=True)
        ]
        return [Cache(self.layouts, (each.memory,)) for each in self._shared]

    def lease(self) -> list[Any]:
        """The references to a cache that every rank has."""
        for picture in self.pictures:
            oracle.fill(picture, self.table, TokenRange(0, NUM_TOKENS))
        if self.jax is not None:
            self.jax.upload()
        lease_id = new_lease_id()
        return [agent.lease(LeaseRequest("r1", lease_id, self.table, NUM_TOKENS)) for agent in self.agents]

    def fetch(self, source: Side, reference: Any) -> None:
        addresses = tuple(agent.address for agent in source.agents)
        for agent in self.agents:
            agent.fetch(FetchRequest("q1", reference, addresses, self.table, (TokenRange(0, NUM_TOKENS),)))

    def heard(self, kind: type) -> list[Any]:
        """The next notice of every rank."""
        found = [notices.get(timeout=DEADLINE_S) for notices in self.notices]
        assert all(isinstance(notice, kind) for notice in found), found
        return found

    def check(self) -> None:
        if self.jax is not None:
            self.jax.download()
        for picture in self.pictures:
            oracle.expect_tokens(picture, self.table, NUM_TOKENS)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for each in self._shared:
            each.close()


@pytest.fixture
def make_side() -> Iterator:
    made: list[Side] = []

    def make(*what) -> Side:
        made.append(Side(*what))
        return made[-1]

    yield make
    for side in made:
        side.close()


class Steps:
    """Steps of an engine, one after the other, each of which donates the whole cache."""

    def __init__(self, engines: Sequence[JaxEngine]) -> None:
        self._engines, self._stopping, self.error = engines, threading.Event(), ""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for engine in self._engines:
                    engine.rewrite(OTHER_BLOCK)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.error = repr(error)


WAYS = [
    ("jax 4 to host 2", 4, True, 2, False, "float32"),
    ("host 2 to jax 4", 2, False, 4, True, "bfloat16"),
    ("jax 3 to host 2", 3, True, 2, False, "int8"),
    ("host 3 to jax 2", 3, False, 2, True, "float8_e4m3fn"),
    ("jax 3 to jax 4", 3, True, 4, True, "bfloat16"),
    ("jax 1 to jax 2", 1, True, 2, True, "float8_e4m3fn"),
]


@pytest.mark.parametrize(
    ("source", "from_jax", "target", "to_jax", "dtype"), [each[1:] for each in WAYS], ids=[each[0] for each in WAYS]
)
def test_a_cache_moves_while_engines_compute(make_side, source, from_jax, target, to_jax, dtype):
    one = make_side("p0", EngineShape(source, 1, 4, 16, format="token-major"), dtype, from_jax)
    other = make_side("d0", EngineShape(target, 1, 6, 9, format="head-major"), dtype, to_jax)
    engines = [side.jax for side in (one, other) if side.jax is not None]
    references = one.lease()
    num_compiled = [engine.caches.num_compiled for engine in engines]
    with Steps(engines) as steps:
        other.fetch(one, references[0])
        reports = [notice.report for notice in other.heard(Fetched)]
        one.heard(LeaseEnded)
    assert steps.error == ""
    assert {report.tokens for report in reports} == {NUM_TOKENS}
    other.check()
    assert [engine.caches.num_compiled for engine in engines] == num_compiled


def test_arrays_that_are_gone_cost_the_cache_and_not_the_engine(make_side):
    """The request fails with the reason; when the engine has put its arrays right, the next one is served."""
    one = make_side("p0", EngineShape(2, 1, 4, 16, format="token-major"), "float32", True)
    other = make_side("d0", EngineShape(1, 1, 6, 9, format="head-major"), "float32", False)
    reference = one.lease()[0]
    with one.jax.caches.turn() as turn:
        jax.jit(lambda array: array + 1, donate_argnums=0)(turn.arrays[0])
    other.fetch(one, reference)
    (failed,) = other.heard(FetchFailed)
    assert "was donated" in str(failed.error)
    other.heard(BlocksReleased)
    one.heard(LeaseEnded)
    reference = one.lease()[0]
    other.fetch(one, reference)
    other.heard(Fetched)
    other.check()
