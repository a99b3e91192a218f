"""What copies between the arrays of one rank and memory of the host, without agents."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvferry.jax_caches import JaxCaches
from kvferry.layout import EngineShape, attention
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain
from kvferry.staging.mover import Moved, Mover
from kvferry.transport.base import Memory

NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM = 24, 4, 2, 8
DEADLINE_S = 60.0


def model_of(dtype, num_layers=2):
    return attention(num_layers, NUM_HEADS, HEAD_DIM, np.dtype(dtype).name, np.dtype(dtype).itemsize)


def shape_of(tensor_parallel=1, format="token-major", num_blocks=NUM_BLOCKS):
    return EngineShape(tensor_parallel, 1, BLOCK_TOKENS, num_blocks, format=format)


class Side:
    """One rank's mover, and memory of the host beside it."""

    def __init__(self, caches: JaxCaches, rank: int = 0, num_bytes: int = 1 << 20, near: Sequence[Memory] = ()) -> None:
        self.host = np.zeros(num_bytes, np.uint8)
        self.ended = threading.Event()
        own = Memory(self.host.ctypes.data, num_bytes, -1)
        self.mover: Mover = caches.cache(rank).mover([own, *near], self.ended.set)

    @property
    def address(self) -> int:
        return self.host.ctypes.data

    def start(self, source, target, length) -> None:
        """Begin to move rows of absolute addresses."""
        columns = (np.array(each, np.uint64) for each in (source, target, length))
        self.mover.start("key", plain(Copies(*columns, pieces=len(length))))

    def end(self) -> str:
        """How that has ended: the error, or nothing."""
        assert self.ended.wait(DEADLINE_S)
        self.ended.clear()
        (moved,) = self.mover.poll()
        assert isinstance(moved, Moved)
        return moved.error

    def move(self, source, target, length) -> str:
        self.start(source, target, length)
        return self.end()

    def close(self) -> None:
        self.mover.close()
