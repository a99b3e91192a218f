"""What lies where inside a block of vLLM's CPU attention: asked of vLLM's own operator, never assumed.

Its kernels pack keys and values of a block as the instruction set likes them. Every element of a scratch cache is
written through the operator vLLM itself writes with, and found again by its number, bit by bit: a one where the
number has the bit, a zero elsewhere, which every element type can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Affine:
    """Where element (token, dim) of a head lies: `offset + token * token_step + dim * dim_step`, in elements."""

    offset: int
    token_step: int
    dim_step: int


@dataclass(frozen=True, slots=True)
class Tile:
    """What the operator is asked about: the same question has the same answer.

    `isa` as the layer has it, `dtype` of the written keys, `stored` of the cache, `cache_dtype` vLLM's word for it.
    """

    isa: str
    dtype: torch.dtype
    stored: torch.dtype
    cache_dtype: str
    block_tokens: int
    head_dim: int


@lru_cache(maxsize=64)
def probe(tile: Tile) -> tuple[Affine, Affine] | None:
    """Keys and values of a head's tile of `block_tokens * 2 * head_dim` elements, or None when they are not affine.

    Raises RuntimeError when vLLM's operator refuses the tile.
    """
    numbers = _numbers_found(tile)
    shape = 2, tile.block_tokens, tile.head_dim
    size = int(np.prod(shape))
    # Block 1, head 1 of a cache of two of each: neighbours must be where the tensor's own strides say.
    expected = np.arange(1, size + 1)
    if not np.array_equal(np.sort(numbers), expected):
        return None
    place = np.empty(size, np.int64)
    place[numbers - 1] = np.arange(size)
    key, value = (_affine(part) for part in place.reshape(shape))
    return None if key is None or value is None else (key, value)


def _affine(place: NDArray[np.int64]) -> Affine | None:
    """The steps along tokens and dims that explain every place."""
    offset = int(place[0, 0])
    token_step = int(place[1, 0]) - offset if place.shape[0] > 1 else 1
    dim_step = int(place[0, 1]) - offset if place.shape[1] > 1 else 1
    tokens, dims = np.indices(place.shape)
    if min(token_step, dim_step) < 1 or not np.array_equal(place, offset + tokens * token_step + dims * dim_step):
        return None
    return Affine(offset, token_step, dim_step)


def _numbers_found(tile: Tile) -> NDArray[np.int64]:
    """The number of the element that lies at each place of the second block's second head, counted from 1.

    Elements elsewhere have higher numbers, so that one which strays into this tile is seen.
    """
    tokens, heads, dim = 2 * tile.block_tokens, 2, tile.head_dim
    per_tile = 2 * tile.block_tokens * dim
    order = torch.arange(1, per_tile + 1).view(2, tile.block_tokens, 1, dim)
    base = torch.tensor([[3, 2], [1, 0]]) * per_tile  # by block and head
    shift = base.repeat_interleave(tile.block_tokens, 0).view(tokens, heads, 1)
    key, value = (part.repeat(2, heads, 1) + shift for part in order)
    found = np.zeros(per_tile, np.int64)
    for bit in range((4 * per_tile).bit_length()):
        written = _written(tile, (key >> bit) & 1, (value >> bit) & 1)
        found |= written.astype(np.int64) << bit
    return found


def _written(tile: Tile, key: torch.Tensor, value: torch.Tensor) -> NDArray[np.bool_]:
    """Which places of the second block's second head are not zero once vLLM has written these keys and values."""
    from vllm import _custom_ops as ops

    cache = torch.zeros(2, 2, tile.block_tokens, 2 * tile.head_dim, dtype=tile.stored)
    halves = cache.view(2, 2, 2 * tile.block_tokens, tile.head_dim).chunk(2, dim=2)
    slots = torch.arange(key.shape[0], dtype=torch.int64)
    ones = key.to(tile.dtype).contiguous(), value.to(tile.dtype).contiguous()
    ops.cpu_attn_reshape_and_cache(*ones, *halves, slots, tile.isa, kv_cache_dtype=tile.cache_dtype)
    raw = cache[1, 1].contiguous().view(torch.uint8).numpy().reshape(-1).view(f"u{cache.element_size()}")
    return np.asarray(raw != 0, np.bool_)
