"""The pieces that a layer's description is made of, before regions and groups have numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvferry.connectors.vllm.description.engine_facts import DRAFT_PREFIX, EngineFacts, LayerFacts
from kvferry.errors import LayoutError
from kvferry.layout import CacheGroup, Span, State

_FLOAT8: Mapping[str, str] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache as vLLM registers it: its name there, its specification, its tensor `[B, H, N, C]`.

    `prefix` is its engine-independent name. `num_blocks` counts the blocks of block tables. One of them may be several
    of the tensor's.
    """

    layer: str
    prefix: str
    spec: Any
    tensor: torch.Tensor
    num_blocks: int
    engine: EngineFacts

    @property
    def facts(self) -> LayerFacts:
        return self.engine.layer(self.layer)

    @property
    def is_draft(self) -> bool:
        """Whether the layer is a speculator's."""
        return self.prefix.startswith(DRAFT_PREFIX)

    @property
    def kernel_blocks(self) -> int:
        return max(1, self.tensor.shape[0] // self.num_blocks)

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """Distances along B, H, N and C, in bytes."""
        return tuple(step * self.tensor.element_size() for step in self.tensor.stride())


@dataclass(frozen=True, slots=True)
class Part:
    """One state of a layer; `offset` counts from the start of the layer's tensor."""

    state: State
    offset: int
    spans: tuple[Span, ...]
    strides: tuple[int, ...]
    block_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The states of a layer that share block tables. `whole_tokens` and `limits` (window, chunk): see `GroupFacts`."""

    group: CacheGroup
    parts: tuple[Part, ...]
    whole_tokens: int = 0
    limits: tuple[int, int] = (0, 0)


def optional(parts: Parts) -> Parts:
    """Return the same states, marked as ones that the engine can do without."""
    made = (replace(part, state=replace(part.state, optional=True)) for part in parts.parts)
    return replace(parts, parts=tuple(made))


def unsupported(layer: str, spec: Any, what: str, *, found: str = "", hint: str = "") -> LayoutError:
    """The error for a cache that cannot be described."""
    return LayoutError(
        f"the cache of layer {layer} ({type(spec).__name__}) cannot be described: {what}",
        found=found,
        expected="full, sliding-window or chunked attention, latent attention, Mamba 1 and 2, gated delta nets or "
        "short convolutions, in 16, 32 or (scaled per tensor) 8 bits",
        hint=hint or "serve this model without kvferry, and report this",
    )


def dtype_word(dtype: torch.dtype) -> str:
    """Return the name of a data type as PyTorch spells it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def cache_item(cache: Cache) -> tuple[str, int]:
    """Dtype and bytes of an element of keys, values or latents.

    Raises LayoutError for quantised caches whose scales lie where they cannot be seen.
    """
    spec, word = cache.spec, getattr(cache.spec, "cache_dtype_str", None) or cache.engine.cache_dtype
    mode = spec.kv_quant_mode.name
    if mode == "NONE":
        return dtype_word(spec.dtype), spec.dtype.itemsize
    if mode != "FP8_PER_TENSOR" or (word not in _FLOAT8 and word != "fp8_ds_mla"):
        raise unsupported(
            cache.layer, spec, "its quantisation scales are stored outside the cache", found=f"{mode} ({word})"
        )
    if cache.engine.dynamic_scales:
        hint = "leave calculate_kv_scales off and use a checkpoint with scales"
        raise unsupported(cache.layer, spec, "every engine would compute its own scales", found=word, hint=hint)
    return _FLOAT8.get(word, "uint8"), 1
