"""An engine whose cache is tensors of torch in memory of the host, one for each region, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from engines import oracle

from kvferry import Cache, SharedMemory, allocate_shared
from kvferry.layout import CacheModel, EngineShape, Layout, describe
from kvferry.transport.base import Memory


class TorchEngine:
    """`tensors` are those of each rank, and `pictures` show their memory to the oracle."""

    def __init__(self, model: CacheModel, shape: EngineShape, dtype: str) -> None:
        self._shape, self._has_heads_first = shape, shape.format == "head-major"
        plain = describe(model, shape, 0)
        sizes = [sum(region.size_bytes for region in layout.regions) for layout in plain]
        self._shared = [allocate_shared(size, "torch") for size in sizes]
        moved = [
            describe(model, shape, shared.memory.address - layout.regions[0].address)
            for layout, shared in zip(plain, self._shared, strict=True)
        ]
        self.layouts = tuple(of_all[rank] for rank, of_all in enumerate(moved))
        self.tensors = [
            self._tensors(layout, shared, getattr(torch, dtype))
            for layout, shared in zip(self.layouts, self._shared, strict=True)
        ]
        self.pictures = [
            oracle.Memory(layout, {tensor.data_ptr(): bytes_of(tensor).numpy().reshape(-1) for tensor in tensors})
            for layout, tensors in zip(self.layouts, self.tensors, strict=True)
        ]
        self.poison()

    @property
    def memories(self) -> list[Memory]:
        return [shared.memory for shared in self._shared]

    def poison(self) -> None:
        for tensors in self.tensors:
            for tensor in tensors:
                bytes_of(tensor).fill_(oracle.POISON)

    def cache(self, rank: int) -> Cache:
        return Cache(self.layouts, (self._shared[rank].memory,))

    def upload(self) -> None:
        """Pictures and tensors are the same memory."""

    download = upload

    def read(self, number: int, table: Sequence[int], num_tokens: int) -> np.ndarray:
        """What the engine's attention would read of a state: bytes by token, head and dim."""
        blocks, slots = np.divmod(np.arange(num_tokens), self._shape.block_tokens)
        where = torch.tensor(table)[torch.tensor(blocks)], torch.tensor(slots)
        parts = [bytes_of(tensors[number]) for tensors in self.tensors]
        of_ranks = [part[where[0], :, where[1]] if self._has_heads_first else part[where] for part in parts]
        return torch.cat(of_ranks, dim=1).numpy()

    def close(self) -> None:
        self.tensors.clear()
        self.pictures.clear()
        for shared in self._shared:
            shared.close()

    def _tensors(self, layout: Layout, shared: SharedMemory, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[block, head, token, dim]` (HND), or with tokens first (NHD)."""
        all_bytes = torch.frombuffer(shared.buffer, dtype=torch.uint8)
        heads, dim = (len(span) for span in layout.placements[0].spans)
        inner = (heads, self._shape.block_tokens) if self._has_heads_first else (self._shape.block_tokens, heads)
        sizes = self._shape.num_blocks, *inner, dim
        assert {region.size_bytes for region in layout.regions} == {math.prod(sizes) * dtype.itemsize}
        starts = [region.address - shared.memory.address for region in layout.regions]
        return [
            all_bytes[start : start + region.size_bytes].view(dtype).view(sizes)
            for start, region in zip(starts, layout.regions, strict=True)
        ]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, whose innermost dimension is bytes."""
    return tensor.view(torch.uint8)
