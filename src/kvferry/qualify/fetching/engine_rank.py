"""One rank of an engine on the device that is checked: its cache, its agents, and what must be in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry import Agent, AgentConfig, Cache, Memory, Notice, Timing, allocate_shared, open_agent
from kvferry.devices import cache_device
from kvferry.errors import TransportError
from kvferry.layout import CacheModel, EngineShape, Layout, describe
from kvferry.options import StagingMemory, staging_named
from kvferry.qualify.torch_device import TorchDevice
from kvferry.transport.memory_kind import HOST

NOTICE_S: Final = 60.0
TIMING: Final = Timing(lease_s=120.0)
POISON: Final = 0xA5


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """How bytes get from one cache to another: whose memory transports register, where staging memory lies, and the
    strategy."""

    buffer_device: str
    staging: StagingMemory
    strategy: str

    @property
    def name(self) -> str:
        where = "host memory" if self.buffer_device == HOST else "device memory"
        return f"{self.strategy}, {where}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What both engines keep of `num_tokens` tokens, and how: keys and values of a layer are regions of their own."""

    model: CacheModel
    head_dim: int
    block_tokens: int
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each engine, of which half are used."""
        return 2 * self.num_tokens // self.block_tokens

    def shape(self, tensor_parallel: int) -> EngineShape:
        """Return the shape of an engine with so many ranks."""
        return EngineShape(tensor_parallel, 1, self.block_tokens, self.num_blocks, "token-major")

    def table(self, side: str) -> tuple[int, ...]:
        """Return the block table of one side. It is in any order, and differs between the sides."""
        return tuple(random.Random(side).sample(range(self.num_blocks), self.num_blocks // 2))

    def logical(self, memory: NDArray[np.uint8], table: tuple[int, ...]) -> NDArray[np.uint16]:
        """The request's elements in a rank's memory as (layer and kind, block, token, head, dim): plain indexing."""
        shape = 2 * self.model.num_layers, self.num_blocks, self.block_tokens, -1, self.head_dim
        return memory.view(np.uint16).reshape(shape)[:, list(table)]

    def contents(self, tensor_parallel: int, rank: int) -> NDArray[np.uint8]:
        """Return what is in the memory of a source's rank."""
        num_bytes = self.num_blocks * self.block_tokens * self.model.bytes_per_token // tensor_parallel
        return np.random.default_rng(rank).integers(0, 256, num_bytes, np.uint8)


class EngineRank:
    """One rank of an engine. To be closed."""

    def __init__(self, device: TorchDevice, layouts_at: Callable[[int], tuple[Layout, ...]], num_bytes: int) -> None:
        """`layouts_at` gives the layouts of the engine's ranks, given the address at which this rank lies."""
        self._device, self._closing = device, ExitStack()
        self._shared_fd = -1
        if device.kind == HOST:
            shared = allocate_shared(num_bytes, "kvferry-qualify")
            self._closing.callback(shared.close)
            self._shared_fd = shared.memory.shared_fd
            self.memory = torch.frombuffer(shared.buffer, dtype=torch.uint8)
        else:
            self.memory = device.empty(num_bytes)
        self._layouts = layouts_at(self.memory.data_ptr())

    def open(self, config: AgentConfig, path: MemoryPath, notices: SimpleQueue[Notice]) -> Agent:
        """An agent over the cache, which is to be entered, and closed before this. Raises what `open_agent` does."""
        config = replace(config, timing=TIMING, staging=staging_named(path.strategy))
        return open_agent(config, self._cache(path), notices.put)

    def fill(self, contents: NDArray[np.uint8] | int) -> None:
        """Fill the memory with these bytes, or with one byte everywhere."""
        if isinstance(contents, int):
            self.memory.fill_(contents)
        else:
            self.memory.copy_(torch.from_numpy(contents))
        self._device.wait()

    def close(self) -> None:
        """Free the memory."""
        self._closing.close()

    def _cache(self, path: MemoryPath) -> Cache:
        memory = Memory(self.memory.data_ptr(), len(self.memory), self._shared_fd)
        return cache_device(self._device.torch, path.buffer_device, path.staging).cache(self._layouts, (memory,))


def next_notice(notices: SimpleQueue[Notice]) -> Notice:
    """Wait for a notice. Raises TransportError when there is none within a deadline."""
    try:
        return notices.get(timeout=NOTICE_S)
    except Empty:
        raise TransportError(f"the agent says nothing for {NOTICE_S:g} s") from None


def layouts_of(geometry: Geometry, tensor_parallel: int, rank: int, kind: str) -> Callable[[int], tuple[Layout, ...]]:
    """Return a function from the address at which rank `rank` lies to the layouts of the engine's ranks."""

    def at(address: int) -> tuple[Layout, ...]:
        layouts = list(describe(geometry.model, geometry.shape(tensor_parallel), address))
        own, where = layouts[rank], "dram" if kind == HOST else "vram"
        moved = (replace(each, address=each.address - (rank << 40), kind=where) for each in own.regions)
        layouts[rank] = replace(own, regions=tuple(moved))
        return tuple(layouts)

    return at
