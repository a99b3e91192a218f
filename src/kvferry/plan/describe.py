"""Layouts of whole engines from a handful of numbers: for `kvferry plan`, for tests, for connectors to check against.

A memory format is a permutation of six letters, outermost first: `L` layer, `K` key or value, `B` block, `N` token
(slot), `H` head, `D` dim. Leading `L` and `K` are separate allocations.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from math import prod

from kvferry.errors import ConfigurationError, LayoutError
from kvferry.plan.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.sharding import shares, stages
from kvferry.plan.span import Span

__all__ = ["FORMATS", "Attention", "EngineShape", "attention_states", "describe"]

FORMATS = {
    "token-major": "LKBNHD",
    "head-major": "LKBHND",
    "interleaved": "LBKNHD",
    "packed": "LBHNKD",
    "block-major": "BLKNHD",
    "block-head-major": "BLKHND",
}
"""Names for the formats seen in engines; any other permutation of the six letters works as well."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The cache of a model whose layers are all full attention: per layer a key and a value per token and head."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    item_bytes: int

    def __post_init__(self) -> None:
        _check_positive("a model", self.num_layers, self.num_heads, self.head_dim, self.item_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and heads, each counted once."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How one engine divides and stores the cache. Ranks are numbered stage by stage, `tensor_parallel` per stage."""

    tensor_parallel: int
    pipeline_parallel: int
    block_tokens: int
    num_blocks: int
    format: str

    def __post_init__(self) -> None:
        _check_positive("an engine", self.tensor_parallel, self.pipeline_parallel, self.block_tokens, self.num_blocks)


def _check_positive(what: str, *numbers: int) -> None:
    if min(numbers) < 1:
        raise LayoutError(f"every number of {what} must be at least 1", found=str(numbers))


def attention_states(attention: Attention) -> tuple[State, ...]:
    """The states of all layers, in order: `model.layers.0.k`, `model.layers.0.v`, …"""
    axes = (Axis("head", attention.num_heads), Axis("dim", attention.head_dim))
    return tuple(
        State(f"model.layers.{layer}.{kind}", attention.dtype, attention.item_bytes, axes, per_token=True)
        for layer in range(attention.num_layers)
        for kind in ("k", "v")
    )


def describe(attention: Attention, shape: EngineShape, first_address: int) -> tuple[Layout, ...]:
    """One layout per rank. Regions of a rank lie back to back; rank `r` starts at `first_address + r * 2**40`.

    Raises ConfigurationError for an unknown format, LayoutError when heads or layers cannot be divided.
    """
    heads = shares(attention.num_heads, shape.tensor_parallel, "heads")
    layers = stages(attention.num_layers, shape.pipeline_parallel)
    boxes = [(stage, span) for stage in layers for span in heads]
    return tuple(
        _Rank(attention, shape, stage, span, first_address + (rank << 40)).layout()
        for rank, (stage, span) in enumerate(boxes)
    )


def _letters(name: str) -> str:
    letters = FORMATS.get(name, name)
    if sorted(letters) != sorted("LKBNHD"):
        raise ConfigurationError(
            "unknown cache format",
            found=name,
            expected=f"one of {', '.join(FORMATS)}, or a permutation of LKBNHD",
            hint="outermost letter first: L layer, K key/value, B block, N token, H head, D dim",
        )
    return letters


@dataclass(frozen=True, slots=True)
class _Rank:
    attention: Attention
    shape: EngineShape
    layers: Span
    heads: Span
    address: int

    def layout(self) -> Layout:
        num_regions = prod(self._sizes()[letter] for letter in self._outside())
        size_bytes = prod(self._sizes().values()) * self.attention.item_bytes // num_regions
        regions = tuple(Region(self.address + i * size_bytes, size_bytes, "dram", 0) for i in range(num_regions))
        states = attention_states(self.attention)[2 * self.layers.start : 2 * self.layers.stop]
        return Layout(
            states=states,
            regions=regions,
            groups=(CacheGroup(self.shape.block_tokens, self.shape.num_blocks, ring_tokens=0),),
            placements=tuple(self._placement(state.name, *divmod(i, 2), size_bytes) for i, state in enumerate(states)),
        )

    def _placement(self, name: str, layer: int, kind: int, region_bytes: int) -> Placement:
        strides = self._strides()
        position = layer * strides["L"] + kind * strides["K"]
        region, offset = divmod(position, region_bytes)
        return Placement(
            state=name,
            region=region,
            group=0,
            offset=offset,
            spans=(self.heads, Span(0, self.attention.head_dim)),
            strides=(strides["H"], strides["D"]),
            block_stride=strides["B"],
            token_stride=strides["N"],
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {"L": len(self.layers), "K": 2, "B": self.shape.num_blocks, "N": self.shape.block_tokens}
        return sizes | {"H": len(self.heads), "D": self.attention.head_dim}

    def _outside(self) -> str:
        """The leading layer and key/value letters: these are allocations of their own."""
        return "".join(takewhile(lambda letter: letter in "LK", _letters(self.shape.format)))

    def _strides(self) -> dict[str, int]:
        strides, step = {}, self.attention.item_bytes
        for letter in reversed(_letters(self.shape.format)):
            strides[letter] = step
            step *= self._sizes()[letter]
        return strides
