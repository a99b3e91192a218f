"""The description: where every element of a request's cache lives in one rank.

Nothing here knows a model, an engine or a device. A new model, parallelism or memory format is new data.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

from kvferry.errors import LayoutError
from kvferry.plan.description.extents import Extent, Step, overlapping
from kvferry.plan.description.span import MAX_STOP, Span
from kvferry.plan.description.tokens import UNSHARED, TokenRange, TokenShare

# The region's size does not limit a stride between blocks or tokens where there is only one of them: this does.
MAX_DISTANCE = 1 << 62


@dataclass(frozen=True, slots=True)
class Axis:
    """A named logical dimension of a state and its extent over all ranks of the engine."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True)
class State:
    """One named tensor of a request's cache, the same on every engine that serves the model.

    `axes` are its dimensions without the token dimension; `per_token` says whether it has one (attention) or is of
    fixed size (state-space models). `item_bytes` is the size of one element.

    A token sees at most the last `window_tokens` tokens, itself included (sliding window), and none before the last
    multiple of `chunk_tokens` (chunked local attention); 0 where there is no such limit.

    Attention over compressed tokens keeps one entry for every `compress_ratio` of them, from a multiple of it on, and
    none for those that do not fill one. Such a state counts entries wherever others count tokens.

    An engine can do without an `optional` state: one that lacks it may be on the other side, and then it does not move.
    """

    name: str
    dtype: str
    item_bytes: int
    axes: tuple[Axis, ...]
    per_token: bool
    window_tokens: int = 0
    chunk_tokens: int = 0
    compress_ratio: int = 1
    optional: bool = False

    @property
    def token_limits(self) -> tuple[bool, int, int, int]:
        """What decides which tokens move: equal for states of which the same tokens move."""
        return self.per_token, self.window_tokens, self.chunk_tokens, self.compress_ratio

    def num_bytes(self, box: Sequence[Span]) -> int:
        """The bytes that a box takes for one token or entry, or altogether for a state of fixed size."""
        return self.item_bytes * prod(map(len, box))

    def entries(self, tokens: TokenRange) -> TokenRange:
        """The entries that become complete with the tokens of a range: the tokens themselves if none are compressed."""
        return TokenRange(tokens.first // self.compress_ratio, tokens.last // self.compress_ratio)

    def seen_by_next(self, tokens: TokenRange) -> TokenRange:
        """The part of a range that the token after it, `tokens.last`, or a later one still sees, in entries."""
        if self.compress_ratio > 1:
            return self.entries(tokens)
        first = tokens.first
        if self.window_tokens:
            first = max(first, tokens.last - (self.window_tokens - 1))
        if self.chunk_tokens:
            first = max(first, tokens.last // self.chunk_tokens * self.chunk_tokens)
        return TokenRange(min(first, tokens.last), tokens.last)


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory of one rank: `address` in the rank's own address space, `kind` such as `dram` or `vram`."""

    address: int
    size_bytes: int
    kind: str
    device: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """States that share one block table per request.

    Token `t` lives in block `table[t // block_tokens]`, slot `t % block_tokens`. When `ring_tokens` is not 0 the group
    keeps only the last tokens: `t` is taken modulo `ring_tokens` first. Under context parallelism the rank has only
    its `share` of the tokens and numbers those without gaps.

    A block may consist of `kernel_blocks` smaller ones, which follow one another in memory: `block_stride` of a
    placement is the distance of these.

    Where states keep an entry for several tokens (`State.compress_ratio`), `block_tokens` and the like count entries.

    `tail_is_free` says that a fetch may write the slots behind a request's last token: whatever lies there is written
    again before it is read. Then blocks need not be taken apart where a request ends.
    """

    block_tokens: int
    num_blocks: int
    ring_tokens: int
    kernel_blocks: int = 1
    share: TokenShare = UNSHARED
    tail_is_free: bool = False

    @property
    def kernel_tokens(self) -> int:
        """Tokens of a kernel block."""
        return self.block_tokens // self.kernel_blocks

    def kept(self, num_tokens: int) -> TokenRange:
        """The tokens of a request of `num_tokens` that the group has; before a ring's, others have been written over
        them."""
        return TokenRange(max(0, num_tokens - self.ring_tokens) if self.ring_tokens else 0, num_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one state's box lies in one rank.

    `spans` and `strides` (bytes) have one entry per axis of the state, in the state's order. `offset` is the distance
    in bytes from the region's start to the element at block 0, slot 0 and the start of every span; `block_stride` and
    `token_stride` (0 for a state without tokens) are the distances between blocks and between tokens of a block.
    """

    state: str
    region: int
    group: int
    offset: int
    spans: tuple[Span, ...]
    strides: tuple[int, ...]
    block_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All placements of one rank. Checked when it is built: no element may lie outside its region."""

    states: tuple[State, ...]
    regions: tuple[Region, ...]
    groups: tuple[CacheGroup, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        _check_records(self)
        states = {state.name: state for state in self.states}
        placed: set[str] = set()
        for placement in self.placements:
            if placement.state in placed:
                raise LayoutError("a rank must hold a state once", found=f"{placement.state} twice")
            placed.add(placement.state)
            _check_placement(self, states, placement)
        _check_apart(self, states)

    def state_named(self) -> dict[str, State]:
        """States by name."""
        return {state.name: state for state in self.states}

    def placement_of(self) -> dict[str, Placement]:
        """Placements by the name of their state."""
        return {placement.state: placement for placement in self.placements}

    def address_of(self, placement: Placement, box: Sequence[Span]) -> int:
        """The address of the first element of a box, which is a part of the placement's, in block 0, slot 0."""
        axes = zip(box, placement.spans, placement.strides, strict=True)
        inside = sum((wanted.start - held.start) * stride for wanted, held, stride in axes)
        return self.regions[placement.region].address + placement.offset + inside


def sharing_parts(layout: Layout) -> Layout:
    """An equal layout that shares its parts with the equal layouts of this process, addresses apart.

    Ranks of one fleet differ in the addresses of their regions only: what is known of a thousand of them then takes
    little more memory than what is known of one.
    """
    states, groups, placements = _first_of_equals(layout.states, layout.groups, layout.placements)
    return replace(layout, states=states, groups=groups, placements=placements)


@lru_cache(maxsize=256)
def _first_of_equals(
    states: tuple[State, ...], groups: tuple[CacheGroup, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[State, ...], tuple[CacheGroup, ...], tuple[Placement, ...]]:
    return states, groups, placements


def fingerprint(layout: Layout) -> str:
    """A short name for the whole description: equal for equal layouts, addresses apart."""
    plain = (layout.states, [r.size_bytes for r in layout.regions], layout.groups, layout.placements)
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def contents(*layouts: Layout) -> str:
    """A short name for what must be kept of a request, wherever it lies: engines with equal names can exchange it.

    `layouts` are those of all ranks of one engine.
    """
    plain = sorted({repr(state) for layout in layouts for state in layout.states if not state.optional})
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def _check_records(layout: Layout) -> None:
    names = [state.name for state in layout.states]
    if len(set(names)) != len(names):
        doubles = sorted(name for name, number in Counter(names).items() if number > 1)
        raise LayoutError("state names must be unique", found=", ".join(doubles[:8]))
    for state in layout.states:
        _check_state(state)
    for region in layout.regions:
        if region.address < 0 or region.size_bytes < 1 or region.address + region.size_bytes > 2**64:
            raise LayoutError("a region must lie in the address space", found=repr(region))
    _check_regions(layout.regions)
    for group in layout.groups:
        _check_group(group)


def _check_regions(regions: Sequence[Region]) -> None:
    """Memory that is in two regions would be registered twice."""
    ordered = sorted(regions, key=lambda region: (region.kind, region.device, region.address))
    for one, other in pairwise(ordered):
        is_beside = (one.kind, one.device) == (other.kind, other.device)
        if is_beside and other.address < one.address + one.size_bytes:
            found = " and ".join(f"{each.address:#x} to {each.address + each.size_bytes:#x}" for each in (one, other))
            raise LayoutError("regions overlap", found=found, expected="memory in one region only")


def _check_state(state: State) -> None:
    if state.item_bytes < 1 or any(axis.extent < 1 for axis in state.axes):
        raise LayoutError("sizes must be positive", found=repr(state))
    limits = state.window_tokens, state.chunk_tokens
    if min(limits) < 0 or all(limits) or (any(limits) and not state.per_token):
        raise LayoutError("a state with tokens has a window or chunks or neither", found=repr(state))
    if not 1 <= state.compress_ratio <= MAX_STOP or (state.compress_ratio > 1 and (any(limits) or not state.per_token)):
        expected = "compress_ratio of 1, or more for a state with tokens that has neither window nor chunks"
        raise LayoutError("this state cannot be compressed", found=repr(state), expected=expected)


def _check_group(group: CacheGroup) -> None:
    sizes = group.block_tokens, group.num_blocks, group.kernel_blocks
    if min(sizes) < 1 or group.ring_tokens < 0 or max(*sizes, group.ring_tokens) > MAX_STOP:
        expected = f"1 to {MAX_STOP} of each"
        raise LayoutError("a cache group needs blocks that hold tokens", found=repr(group), expected=expected)
    if group.block_tokens % group.kernel_blocks:
        raise LayoutError(
            "kernel blocks must divide a block",
            found=f"{group.kernel_blocks} in a block of {group.block_tokens} tokens",
        )
    if group.ring_tokens and group.share.num_shares > 1:
        raise LayoutError("a ring cannot be divided by context parallelism", found=repr(group))


def _check_placement(layout: Layout, states: dict[str, State], placement: Placement) -> None:
    where = f"placement of {placement.state}"
    if placement.state not in states:
        raise LayoutError(f"{where}: the layout has no such state", expected=", ".join(states))
    if not (0 <= placement.region < len(layout.regions) and 0 <= placement.group < len(layout.groups)):
        raise LayoutError(
            f"{where}: region or group does not exist",
            found=f"region {placement.region}, group {placement.group}",
        )
    state = states[placement.state]
    if not len(state.axes) == len(placement.spans) == len(placement.strides):
        raise LayoutError(f"{where}: one span and one stride per axis", found=repr(placement))
    for axis, span in zip(state.axes, placement.spans, strict=True):
        if span.stop > axis.extent:
            raise LayoutError(f"{where}: span leaves axis {axis.name}", found=str(span), expected=f"<= {axis.extent}")
    _check_ring(layout.groups[placement.group], state)
    _check_reach(layout, state, placement)


def _check_ring(group: CacheGroup, state: State) -> None:
    """A ring that forgets tokens which a later one sees would move wrong bytes."""
    if not group.ring_tokens or not state.per_token:
        return
    needed = state.chunk_tokens or state.window_tokens - 1
    if group.ring_tokens < needed or not (state.window_tokens or state.chunk_tokens):
        raise LayoutError(
            f"placement of {state.name}: its ring forgets tokens that are still seen",
            found=f"{group.ring_tokens} tokens",
            expected=f"at least {needed}" if needed > 0 else "no ring, as the state has neither window nor chunks",
        )


def _check_reach(layout: Layout, state: State, placement: Placement) -> None:
    group, region = layout.groups[placement.group], layout.regions[placement.region]
    distances = (placement.offset, placement.block_stride, placement.token_stride, *placement.strides)
    if min(distances) < 0 or max(distances) > MAX_DISTANCE:
        what = f"placement of {state.name}: offsets and strides must not be negative nor beyond any memory"
        raise LayoutError(what, found=str(distances), expected=f"0 to {MAX_DISTANCE}")
    _check_overlap(group, state, placement)
    reach = placement.offset + (group.num_blocks * group.kernel_blocks - 1) * placement.block_stride + state.item_bytes
    reach += (group.kernel_tokens - 1) * placement.token_stride if state.per_token else 0
    reach += sum(
        (span.stop - span.start - 1) * stride for span, stride in zip(placement.spans, placement.strides, strict=True)
    )
    if reach > region.size_bytes:
        raise LayoutError(
            f"placement of {state.name} leaves its region",
            found=f"last byte at {reach}",
            expected=f"at most {region.size_bytes}",
        )


def _check_overlap(group: CacheGroup, state: State, placement: Placement) -> None:
    """Raises LayoutError unless each step, from the innermost dimension outwards, spans all that lies inside it."""
    inside = state.item_bytes
    for stride, count in reversed(_steps(group, state, placement)):
        if stride < inside:
            raise LayoutError(
                f"placement of {state.name}: elements overlap",
                found=f"a stride of {stride} bytes",
                expected=f"at least the {inside} bytes that lie inside it",
            )
        inside += (count - 1) * stride


def _steps(group: CacheGroup, state: State, placement: Placement) -> tuple[Step, ...]:
    """The stride of each dimension, blocks and tokens among them, and how many there are; the outermost first."""
    steps = [(stride, len(span)) for span, stride in zip(placement.spans, placement.strides, strict=True)]
    steps.append((placement.block_stride, group.num_blocks * group.kernel_blocks))
    if state.per_token:
        steps.append((placement.token_stride, group.kernel_tokens))
    return tuple(sorted((step for step in steps if step[1] > 1), reverse=True))


def _check_apart(layout: Layout, states: dict[str, State]) -> None:
    """A block holds all states of its group, so none may lie upon another. Groups share memory where engines take the
    blocks of all groups from one pool."""
    laid: dict[tuple[int, int], list[Extent]] = defaultdict(list)
    for placement in layout.placements:
        group, state = layout.groups[placement.group], states[placement.state]
        steps = _steps(group, state, placement)
        extent = Extent(state.name, placement.offset, state.item_bytes, steps)
        laid[placement.region, placement.group].append(extent)
    for extents in laid.values():
        if two := overlapping(extents):
            raise LayoutError(
                "two states lie in the same memory",
                found=" and ".join(f"{extent.name} at offset {extent.start:,}" for extent in two),
                expected="a place of its own for each state of a cache group",
            )
