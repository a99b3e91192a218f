"""Layouts of whole engines from a model and a handful of numbers: for `kvferry plan`, for tests, to check connectors.

A memory format is a permutation of six letters, outermost first: `L` layer, `K` the states of a layer (key and value),
`B` block, `N` token (slot), `H` the first axis of a state that has several (head), `D` the other axes (dim). Leading
`L` and `K` are separate allocations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from kvferry.errors import ConfigurationError, LayoutError
from kvferry.plan.description.arrange import Arranged, Member, arrange, pooled
from kvferry.plan.description.layout import CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import CacheModel, Kept
from kvferry.plan.description.span import Span, share, stages
from kvferry.plan.description.tokens import UNSHARED, TokenShare

FORMATS = {
    "token-major": "LKBNHD",
    "head-major": "LKBHND",
    "interleaved": "LBKNHD",
    "packed": "LBHNKD",
    "block-major": "BLKNHD",
    "block-head-major": "BLKHND",
}
"""Names for the formats seen in engines; any other permutation of the six letters works as well."""


MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How one engine divides and stores the cache.

    Ranks are numbered by pipeline stage, then by `context_parallel` (ranks of their own that share out the tokens),
    then by tensor parallelism. `decode_context_parallel` shares the tokens out among tensor-parallel ranks that would
    otherwise hold the same; `run_tokens` is the interleave of both.

    `kernel_blocks` is how many smaller blocks make up one. States of fixed size are stored one after another in a
    block, each with its axis `outer_axis` outermost when it has one (`width` for width-major convolution states). With
    `shared_pool`, all cache groups take their blocks from the same memory: every block is as large as the largest.
    """

    tensor_parallel: int
    pipeline_parallel: int
    block_tokens: int
    num_blocks: int
    format: str
    context_parallel: int = 1
    decode_context_parallel: int = 1
    run_tokens: int = 1
    kernel_blocks: int = 1
    outer_axis: str = ""
    shared_pool: bool = False

    def __post_init__(self) -> None:
        numbers = self.tensor_parallel, self.pipeline_parallel, self.block_tokens, self.num_blocks
        parallel = self.context_parallel, self.decode_context_parallel, self.run_tokens, self.kernel_blocks
        if min(*numbers, *parallel) < 1:
            raise LayoutError("every size of an engine must be at least 1", found=str((*numbers, *parallel)))
        if self.num_ranks > MAX_RANKS:
            raise LayoutError("too many ranks", found=f"{self.num_ranks:,}", expected=f"at most {MAX_RANKS:,}")
        if self.block_tokens % self.kernel_blocks:
            found = f"{self.kernel_blocks} in a block of {self.block_tokens} tokens"
            raise LayoutError("kernel blocks must divide a block", found=found)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def letters(self) -> str:
        """The memory format, outermost letter first. Raises ConfigurationError when it is none."""
        letters = FORMATS.get(self.format, self.format)
        if sorted(letters) != sorted("LKBNHD"):
            raise ConfigurationError(
                "unknown cache format",
                found=self.format,
                expected=f"one of {', '.join(FORMATS)}, or a permutation of LKBNHD",
                hint="outermost letter first: L layer, K key/value, B block, N token, H head, D dim",
            )
        return letters


def describe(model: CacheModel, shape: EngineShape, first_address: int) -> tuple[Layout, ...]:
    """One layout per rank. Regions of a rank lie back to back; rank `r` starts at `first_address + r * 2**40`.

    Raises ConfigurationError for an unknown format, LayoutError when heads, layers or tokens cannot be divided.
    """
    _check_token_shares(model, shape)
    coordinates = [
        (layers, context, tensor)
        for layers in stages(model.num_layers, shape.pipeline_parallel)
        for context in range(shape.context_parallel)
        for tensor in range(shape.tensor_parallel)
    ]
    return tuple(
        _Rank(model, shape, layers, context, tensor).layout(first_address + (rank << 40))
        for rank, (layers, context, tensor) in enumerate(coordinates)
    )


def _check_token_shares(model: CacheModel, shape: EngineShape) -> None:
    """Only ranks that would hold the same can share the tokens out among themselves."""
    for kept in model.kept():
        first = divided(kept, shape, 0)
        replicas = sum(divided(kept, shape, rank) == first for rank in range(shape.tensor_parallel))
        if kept.state.compress_ratio > 1 and shape.context_parallel * shape.decode_context_parallel > 1:
            raise LayoutError(
                f"the compressed tokens of state {kept.state.name} cannot be divided among ranks",
                found=f"{kept.state.compress_ratio} tokens an entry under context parallelism",
                expected="tensor and pipeline parallelism alone",
            )
        if kept.state.per_token and replicas % shape.decode_context_parallel:
            raise LayoutError(
                f"the tokens of state {kept.state.name} cannot be divided among ranks",
                found=f"{shape.decode_context_parallel} shares; ranks that hold the same: {replicas}",
                expected="a number of shares that divides the number of those ranks",
            )


def divided(kept: Kept, shape: EngineShape, rank: int) -> Span:
    """The span of the divided axis on a tensor-parallel rank."""
    for axis in kept.state.axes:
        if axis.name == kept.divided_axis:
            return share(axis.extent, shape.tensor_parallel, rank, f"axis {axis.name} of state {kept.state.name}")
    return Span(0, 1)


@dataclass(frozen=True, slots=True)
class _Rank:
    model: CacheModel
    shape: EngineShape
    layers: Span
    context: int
    tensor: int

    def layout(self, address: int) -> Layout:
        arranged = [self._arranged(self._members(name)) for name in self.model.groups()]
        if self.shape.shared_pool and arranged:
            arranged = pooled(arranged, self.shape.num_blocks, self.shape.kernel_blocks)
        sizes = arranged[:1] if self.shape.shared_pool else arranged
        region_bytes = [size_bytes for group in sizes for size_bytes in group.region_bytes]
        starts = accumulate(region_bytes, initial=address)
        places = [place for group in arranged for place in group.places]
        return Layout(
            states=tuple(place.member.state for place in places),
            regions=tuple(Region(start, size, "dram", 0) for start, size in zip(starts, region_bytes, strict=False)),
            groups=tuple(self._group(name) for name in self.model.groups()),
            placements=tuple(self._placements(arranged)),
        )

    def _members(self, name: str) -> list[Member]:
        """The states of a group that this rank holds, in the model's order."""
        layers = [layer for layer in self.model.layers if layer.group == name]
        held = [layer for layer in layers if self.layers.start <= layer.layer < self.layers.stop]
        return [
            self._member(kept, (index, kind))
            for index, layer in enumerate(held)
            for kind, kept in enumerate(layer.kept)
        ]

    def _member(self, kept: Kept, place: tuple[int, int]) -> Member:
        shape, state = self.shape, kept.state
        held = divided(kept, shape, self.tensor)
        axes = tuple(range(len(state.axes)))
        outer = axes[:1] if state.per_token and len(axes) > 1 else ()
        inner = axes[len(outer) :]
        if not state.per_token:
            inner = tuple(sorted(axes, key=lambda axis: state.axes[axis].name != shape.outer_axis))
        return Member(
            state=state,
            spans=tuple(held if a.name == kept.divided_axis else Span(0, a.extent) for a in state.axes),
            layer=place[0],
            kind=place[1],
            num_blocks=shape.num_blocks * (shape.kernel_blocks if state.per_token else 1),
            num_slots=self._block_entries(state) // shape.kernel_blocks if state.per_token else 1,
            outer_axes=outer,
            inner_axes=inner,
        )

    def _block_entries(self, state: State) -> int:
        """What a block holds of a state: its tokens, or entries of several."""
        entries, rest = divmod(self.shape.block_tokens, state.compress_ratio)
        if rest or entries % self.shape.kernel_blocks:
            raise LayoutError(
                f"blocks do not hold whole entries of state {state.name}",
                found=f"{self.shape.block_tokens // self.shape.kernel_blocks} tokens a block",
                expected=f"a multiple of {state.compress_ratio}",
            )
        return entries

    def _arranged(self, members: list[Member]) -> Arranged:
        letters = self.shape.letters
        if self.shape.shared_pool or not all(member.state.per_token for member in members):
            # A block in one piece; states of fixed size, which differ in shape, one after another in it.
            order = "LB" if letters.index("L") < letters.index("B") else "BL"
            letters = order + letters.translate({ord("L"): "", ord("B"): ""})
            letters = letters if all(member.state.per_token for member in members) else order + "KNHD"
        return arrange(letters, members)

    def _placements(self, arranged: list[Arranged]) -> Iterator[Placement]:
        first_region = 0
        for group, found in enumerate(arranged):
            for place in found.places:
                yield Placement(
                    state=place.member.state.name,
                    region=first_region + place.region,
                    group=group,
                    offset=place.offset,
                    spans=place.member.spans,
                    strides=place.axis_strides(),
                    block_stride=place.strides["B"],
                    token_stride=place.strides["N"] if place.member.state.per_token else 0,
                )
            first_region += 0 if self.shape.shared_pool else len(found.region_bytes)

    def _group(self, name: str) -> CacheGroup:
        """A group's blocks. States of fixed size need neither slots nor shares."""
        shape = self.shape
        state = next(k.state for layer in self.model.layers if layer.group == name for k in layer.kept)
        if not state.per_token:
            return CacheGroup(block_tokens=1, num_blocks=shape.num_blocks, ring_tokens=0)
        num_shares = shape.context_parallel * shape.decode_context_parallel
        share = self.context * shape.decode_context_parallel + self.tensor % shape.decode_context_parallel
        return CacheGroup(
            block_tokens=self._block_entries(state),
            num_blocks=shape.num_blocks,
            ring_tokens=0,
            kernel_blocks=shape.kernel_blocks,
            share=TokenShare(num_shares, share, shape.run_tokens) if num_shares > 1 else UNSHARED,
        )
