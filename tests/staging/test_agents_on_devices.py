"""Two engines whose caches lie on a device, and real agents between them: the kernel gathers and scatters every byte.

On a device that is here as in Triton's interpreter; transports reach the staging memory, in pinned host memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from engines import oracle

from kvferry import Agent, AgentConfig, Cache, new_lease_id
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Fetched, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.session.timing import Timing
from kvferry.staging.device import patterns
from kvferry.staging.device.mover import DeviceMover
from kvferry.staging.device.pinned import CudaRuntime, pinned
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions
from kvferry.transport.registry import open_transports

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
SHAPES = {
    "p0": EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major"),
    "d0": EngineShape(1, 1, block_tokens=6, num_blocks=9, format="head-major"),
}
TABLES = {"p0": ((3, 9, 1, 15, 0, 7),), "d0": ((8, 0, 5, 2),)}
NUM_TOKENS = 21
# A busy machine interprets kernels slowly: nobody must be taken for lost meanwhile.
TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=60.0)
DEADLINE_S = 60.0


class NoWait:
    """A side of the interpreter's: what was launched is over, and there is no stream to wait for."""

    def __init__(self, side: Any) -> None:
        self.launch = side.launch

    def finish(self) -> None:
        pass


class DeviceRank:
    """An engine whose cache lies on the device; `memory` is the host's picture of it, for the oracle."""

    def __init__(self, name: str, where: torch.device, side_streams: ModuleType) -> None:
        size_bytes = sum(region.size_bytes for region in describe(MODEL, SHAPES[name], 0)[0].regions)
        self.name, self.where = name, where
        self.cache = torch.full((size_bytes,), oracle.POISON, dtype=torch.uint8, device=where)
        if where.type != "cpu":
            torch.get_device_module(where).synchronize(where)
        (layout,) = describe(MODEL, SHAPES[name], self.cache.data_ptr())
        layout = replace(layout, regions=tuple(replace(region, kind="vram") for region in layout.regions))
        self.picture = np.empty(size_bytes, np.uint8)
        self.memory = oracle.Memory.poisoned_at(layout, self.picture, self.cache.data_ptr())
        self.notices = queue.SimpleQueue()
        side = side_streams.SideStream(where)
        launcher = side if where.type != "cpu" else NoWait(side)

        def mover(near: Sequence[Memory], _notify: Callable[[], None]) -> DeviceMover:
            pins = [pinned(CudaRuntime(where), near)] if where.type == "cuda" else []
            extents = [(memory.address, memory.size_bytes) for memory in near]
            return DeviceMover(launcher, Regions.of([(self.cache.data_ptr(), size_bytes), *extents]), pins)

        opened = open_transports("tcp")
        policy = StagingPolicy((Strategy.PACK,), 5 * MODEL.bytes_per_token)
        config = AgentConfig(
            name, transport="tcp", timing=TIMING, may_switch_direction=False, staging=policy, staging_bytes=1 << 20
        )
        cache = Cache((layout,), (), mover)
        self.agent = Agent(config, cache, self.notices.put, opened.transports, opened.unavailable)
        self.agent.start()

    def next_notice(self, kind: type) -> Any:
        notice = self.notices.get(timeout=DEADLINE_S)
        assert isinstance(notice, kind), notice
        return notice


@pytest.fixture
def make_rank(device, monkeypatch) -> Iterator[Callable[[str], DeviceRank]]:
    from kvferry.staging.device import side_stream

    if device.name == "xpu":
        pytest.skip("nothing pins host memory for xpu yet")
    turn = threading.Lock()

    def copy_tile(*what: Any) -> None:
        # The interpreter changes Triton's own module while a kernel runs.
        with turn:
            device.kernels.copy_tile(*what)

    monkeypatch.setattr(side_stream, "copy_tile", copy_tile)
    monkeypatch.setattr(patterns, "MIN_ROWS", 8)
    where = torch.device("cpu") if device.name == "cpu" else torch.device(device.name, 0)
    made: list[DeviceRank] = []

    def make(name: str) -> DeviceRank:
        made.append(DeviceRank(name, where, side_stream))
        return made[-1]

    yield make
    for rank in made:
        rank.agent.close()


def test_a_cache_moves_from_device_to_device(make_rank):
    source, target = make_rank("p0"), make_rank("d0")
    tokens = TokenRange(0, NUM_TOKENS)
    oracle.fill(source.memory, TABLES["p0"], tokens)
    source.cache.copy_(torch.from_numpy(source.picture))
    reference = source.agent.lease(LeaseRequest("r1", new_lease_id(), TABLES["p0"], NUM_TOKENS))
    target.agent.fetch(FetchRequest("q1", reference, (source.agent.address,), TABLES["d0"], (tokens,)))
    assert target.next_notice(Fetched).report.strategy == "pack"
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")
    target.picture[:] = target.cache.cpu().numpy()
    oracle.expect_tokens(target.memory, TABLES["d0"], NUM_TOKENS)
