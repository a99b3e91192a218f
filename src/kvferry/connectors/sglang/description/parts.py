"""The pieces that a description is made of, before regions and groups have numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.errors import LayoutError
from kvferry.layout import CacheGroup, Placement, Region, Span, State


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a pool does not know: its place among the tensor-parallel ranks, and three numbers of the model, over all
    ranks: heads of keys and values, heads of layers with a window, and groups of Mamba's B and C (0 when unknown).

    A token sees `window_tokens` tokens in layers with a window, itself included.
    """

    tensor_rank: int
    tensor_parallel: int
    num_heads: int
    num_window_heads: int = 0
    num_state_groups: int = 0
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One state of one layer: a tensor that begins in its first block, and where an element is found from there.

    `strides` are in bytes, one for each axis of the state.
    """

    state: State
    tensor: torch.Tensor
    spans: tuple[Span, ...]
    strides: tuple[int, ...]
    block_stride: int
    token_stride: int = 0

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0] * self.tensor.stride(0) * self.tensor.element_size() // self.block_stride

    def placement(self, regions: dict[int, Region], group: int) -> Placement:
        """Return the state's placement in its allocation, which is added to `regions` unless it is there."""
        storage = self.tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in regions:
            device = self.tensor.device
            kind = "dram" if device.type == "cpu" else "vram"
            regions[start] = Region(start, storage.nbytes(), kind, device.index or 0)
        return Placement(
            state=self.state.name,
            region=list(regions).index(start),
            group=group,
            offset=self.tensor.data_ptr() - start,
            spans=self.spans,
            strides=self.strides,
            block_stride=self.block_stride,
            token_stride=self.token_stride,
        )


@dataclass(frozen=True, slots=True)
class Component:
    """States that share lists of pages or slots. `kind` is SGLang's `StateType` of them, empty for the pages that the
    request's tokens have. `buffers` are the addresses by which SGLang knows the memory."""

    kind: str
    group: CacheGroup
    parts: tuple[Part, ...]
    buffers: frozenset[int]

    @property
    def window_tokens(self) -> int:
        """How many tokens a token sees, itself included; 0 where it sees all."""
        return self.parts[0].state.window_tokens


def unsupported(what: str, found: str) -> LayoutError:
    """The error for memory that cannot be described."""
    hint = "use SGLang's own backend for this model: --disaggregation-transfer-backend nixl"
    return LayoutError(what, found=found, hint=hint)


def word_of(dtype: torch.dtype) -> str:
    """Return the name of a data type as PyTorch spells it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
