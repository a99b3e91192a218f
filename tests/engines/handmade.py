"""Engines that no helper of ours describes: padding, any order of axes, uneven and overlapping shares, several cache
groups in another order on each side, rings, states of fixed size. A seed gives the same scenario every time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise, product

from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenShare

Box = tuple[Span, ...]
NUM_GROUPS = 2
COMPRESSED_KIND = 0


@dataclass(frozen=True, slots=True)
class Model:
    """States, the kind of cache group of each, and the tokens that the states of each kind see (0: all). Those of kind
    `COMPRESSED_KIND` may keep an entry for several tokens."""

    states: tuple[State, ...]
    kinds: dict[str, int]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One engine: a layout and the block tables of one request per rank."""

    layouts: tuple[Layout, ...]
    tables: tuple[list[list[int]], ...]


def make_model(dice: random.Random, compress_ratio: int = 1) -> Model:
    """One to four states of any shape, some with an entry for `compress_ratio` tokens."""
    windows = tuple(dice.choice([0, 0, dice.randint(1, 8)]) for _ in range(NUM_GROUPS))
    if compress_ratio > 1:
        windows = tuple(0 if kind == COMPRESSED_KIND else windows[kind] for kind in range(NUM_GROUPS))
    kinds = {f"s{number}": dice.randrange(NUM_GROUPS) for number in range(dice.randint(1, 4))}
    ratios = {COMPRESSED_KIND: compress_ratio}
    states = tuple(_state(dice, name, windows[kind], ratios.get(kind, 1)) for name, kind in kinds.items())
    return Model(states, kinds, windows)


def make_side(dice: random.Random, model: Model, num_tokens: int, first_address: int) -> Side:
    """An engine that holds every part of every state at least once."""
    order = dice.sample(range(NUM_GROUPS), NUM_GROUPS)
    groups = [_group(dice, model.windows[order.index(index)], num_tokens) for index in range(NUM_GROUPS)]
    num_shares, run_tokens = dice.choice([1, 1, 2, 3]), dice.randint(1, 4)
    layouts, tables = [], []
    for rank, (held, share) in enumerate(product(_deal(dice, model.states), range(num_shares))):
        ours = [_shared(group, TokenShare(num_shares, share, run_tokens)) for group in groups]
        builder = _RankBuilder(dice, tuple(ours), first_address + (rank << 40))
        for state in model.states:
            if state.name in held:
                builder.place(state, held[state.name], order[model.kinds[state.name]])
        layouts.append(builder.layout())
        tables.append([_table(dice, group, num_tokens) for group in ours])
    return Side(tuple(layouts), tuple(tables))


def _state(dice: random.Random, name: str, window: int, compress_ratio: int) -> State:
    axes = tuple(Axis(f"axis{number}", dice.randint(1, 5)) for number in range(dice.randint(0, 3)))
    item_bytes = dice.choice([1, 2, 3, 4])
    if dice.random() < 0.3:
        return State(name, "any", item_bytes, axes, per_token=False)
    return State(name, "any", item_bytes, axes, True, window, compress_ratio=compress_ratio)


def _group(dice: random.Random, window: int, num_tokens: int) -> CacheGroup:
    """Blocks for all tokens; where there is a window, sometimes as a ring that just keeps it or some more."""
    kernel_blocks = dice.choice([1, 1, 2])
    block_tokens = kernel_blocks * dice.randint(1, 4)
    num_blocks = -(-max(num_tokens, 1) // block_tokens) + dice.randint(1, 3)
    ring = dice.choice([0, max(1, window - 1) + dice.randint(0, 2)]) if window else 0
    return CacheGroup(block_tokens, num_blocks, ring, kernel_blocks, tail_is_free=dice.random() < 0.3)


def _shared(group: CacheGroup, share: TokenShare) -> CacheGroup:
    return group if group.ring_tokens else replace(group, share=share)


def _table(dice: random.Random, group: CacheGroup, num_tokens: int) -> list[int]:
    positions = min(num_tokens, group.ring_tokens) if group.ring_tokens else num_tokens
    ids = list(range(group.num_blocks))
    if dice.random() < 0.5:
        dice.shuffle(ids)
    return ids[: max(1, -(-positions // group.block_tokens))]


def _deal(dice: random.Random, states: tuple[State, ...]) -> list[dict[str, Box]]:
    """Which box of which state each rank holds: pipeline stages, then shares, some of them on several ranks."""
    num_stages = dice.randint(1, 3)
    stage_of = {state.name: dice.randrange(num_stages) for state in states}
    ranks: list[dict[str, Box]] = []
    for stage in set(stage_of.values()):
        shares = {
            state.name: list(product(*(_cut(dice, axis.extent) for axis in state.axes)))
            for state in states
            if stage_of[state.name] == stage
        }
        num_ranks = max(map(len, shares.values())) + dice.randint(0, 2)
        ranks += [{name: boxes[rank % len(boxes)] for name, boxes in shares.items()} for rank in range(num_ranks)]
    dice.shuffle(ranks)
    return ranks


def _cut(dice: random.Random, extent: int) -> list[Span]:
    cuts = dice.sample(range(1, extent), dice.randint(0, min(2, extent - 1)))
    spans = [Span(start, stop) for start, stop in pairwise([0, *sorted(cuts), extent])]
    if dice.random() < 0.3:
        spans = [Span(max(0, s.start - dice.randint(0, 1)), min(extent, s.stop + dice.randint(0, 1))) for s in spans]
    return spans


class _RankBuilder:
    """Puts boxes into regions, in any order of axes, with gaps."""

    def __init__(self, dice: random.Random, groups: tuple[CacheGroup, ...], address: int) -> None:
        self._dice = dice
        self._groups = groups
        self._address = address
        self._states: list[State] = []
        self._regions: list[Region] = []
        self._placements: list[Placement] = []

    def place(self, state: State, box: Box, group: int) -> None:
        """Lay out one box, in a region of its own or behind what is in the last one."""
        strides, size_bytes = self._strides(state, box, self._groups[group])
        offset = self._dice.randint(0, 7)
        if self._regions and self._dice.random() < 0.5:
            last = self._regions.pop()
            offset += last.size_bytes
            self._regions.append(Region(last.address, offset + size_bytes, "dram", 0))
        else:
            self._regions.append(Region(self._address, offset + size_bytes, "dram", 0))
        self._address = self._regions[-1].address + self._regions[-1].size_bytes + self._dice.randint(0, 3) * 64
        axes = tuple(strides[index] for index in range(len(box)))
        block, token = strides[len(box)], strides.get(len(box) + 1, 0)
        self._states.append(state)
        self._placements.append(Placement(state.name, len(self._regions) - 1, group, offset, box, axes, block, token))

    def layout(self) -> Layout:
        self._dice.shuffle(self._placements)
        return Layout(tuple(self._states), tuple(self._regions), self._groups, tuple(self._placements))

    def _strides(self, state: State, box: Box, group: CacheGroup) -> tuple[dict[int, int], int]:
        """Strides by number: the axes, then block, then token; and the bytes that all of it takes."""
        num_blocks = group.num_blocks * group.kernel_blocks
        extents = [len(span) for span in box] + [num_blocks] + [group.kernel_tokens] * state.per_token
        step, strides = state.item_bytes, {}
        padded = self._dice.random() < 0.5
        for number in self._dice.sample(range(len(extents)), len(extents)):
            step += self._dice.choice([0, 0, 1, state.item_bytes]) if padded else 0
            strides[number] = step
            step *= extents[number]
        return strides, step + 8
