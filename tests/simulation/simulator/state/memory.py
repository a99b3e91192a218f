"""The bytes of one rank: where each element lies, what it must hold, and blocks that are used again at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Column, Copies
from kvferry.session.events import Ahead

Tables = tuple[tuple[int, ...], ...]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupMap:
    """One cache group of a rank. `places` has the index into the rank's bytes of every (block, slot, byte of a token);
    `keys` names each byte of a token by state and logical coordinate, the same on every engine; `numbers` says which of
    the layout's states it is of, counted from 1. `state` is one of the group's states: all have the same window."""

    cache: CacheGroup
    state: State
    places: Indices
    keys: NDArray[np.uint32]
    numbers: Indices

    def at(self, table: Sequence[int], tokens: TokenRange) -> tuple[Indices, NDArray[np.uint32]]:
        """Where the bytes of some tokens lie, and the numbers of these tokens."""
        numbers = np.arange(tokens.first, tokens.last)
        blocks = np.asarray(table, np.int64)
        size = self.cache.block_tokens
        return self.places[blocks[numbers // size], numbers % size], numbers.astype(np.uint32)

    def computed(self, num_tokens: int) -> TokenRange:
        """What is there after so many tokens: they, or the entries that they fill. A state of fixed size is one."""
        return self.state.entries(TokenRange(0, num_tokens)) if self.state.per_token else TokenRange(0, 1)

    def seen(self, tokens: TokenRange) -> TokenRange:
        """The tokens whose bytes matter: those that the next one still sees; a state of fixed size counts as one."""
        return self.state.seen_by_next(tokens) if self.state.per_token else TokenRange(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ByteMap:
    """Where everything lies in one rank; `base` is the address of the first byte."""

    base: int
    num_bytes: int
    groups: tuple[GroupMap | CacheGroup, ...]

    @classmethod
    def of(cls, layout: Layout) -> ByteMap:
        """The map of a layout. Groups of which the rank holds nothing stay what they are."""
        base = min((region.address for region in layout.regions), default=0)
        end = max((region.address + region.size_bytes for region in layout.regions), default=0)
        groups = tuple(_group_map(layout, number, base) for number in range(len(layout.groups)))
        return cls(base, end - base, groups)

    def held(self) -> list[tuple[int, GroupMap]]:
        """The groups of which the rank holds something, with their numbers."""
        return [(number, group) for number, group in enumerate(self.groups) if isinstance(group, GroupMap)]


def _group_map(layout: Layout, number: int, base: int) -> GroupMap | CacheGroup:
    cache, named = layout.groups[number], layout.state_named()
    placements = [placement for placement in layout.placements if placement.group == number]
    if not placements:
        return cache
    parts = [_places(layout, placement, base) for placement in placements]
    places = np.concatenate([places for places, _ in parts], axis=2)
    keys = np.concatenate([keys for _, keys in parts])
    order = {state.name: number for number, state in enumerate(layout.states, start=1)}
    numbers = np.repeat([order[each.state] for each in placements], [len(keys) for _, keys in parts])
    return GroupMap(cache, named[placements[0].state], places, keys, numbers)


def _places(layout: Layout, placement: Placement, base: int) -> tuple[Indices, NDArray[np.uint32]]:
    state, cache = layout.state_named()[placement.state], layout.groups[placement.group]
    start = layout.regions[placement.region].address - base + placement.offset
    offsets, keys = [], []
    for coordinate in product(*(range(span.start, span.stop) for span in placement.spans)):
        steps = zip(coordinate, placement.spans, placement.strides, strict=True)
        offset = sum((place - span.start) * stride for place, span, stride in steps)
        for byte in range(state.item_bytes):
            offsets.append(offset + byte)
            keys.append(crc32(f"{state.name}|{coordinate}|{byte}".encode()))
    kernel, slot = np.divmod(np.arange(cache.block_tokens), cache.kernel_tokens)
    first = np.arange(cache.num_blocks)[:, None] * cache.kernel_blocks
    tokens = start + (first + kernel) * placement.block_stride + slot * placement.token_stride
    return tokens[:, :, None] + np.array(offsets, np.int64), np.array(keys, np.uint32)


def pattern(salt: int, numbers: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """What the bytes of a request are: they encode request, state, token and logical coordinate."""
    mixed = keys[None, :] * np.uint32(0x9E3779B1) + numbers[:, None] * np.uint32(0x85EBCA6B) + np.uint32(salt)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x2C1B3C6D)
    mixed ^= mixed >> np.uint32(13)
    return mixed.astype(np.uint8)


class RankMemory:
    """The bytes of one rank of one incarnation: its caches, and `arena_bytes` of staging memory behind them."""

    def __init__(self, layout_map: ByteMap, arena_bytes: int) -> None:
        self.map = layout_map
        self.arena_bytes = arena_bytes
        self.arena_address = layout_map.base + layout_map.num_bytes
        self.bytes = np.zeros(layout_map.num_bytes + arena_bytes, np.uint8)

    def indices(self, starts: Column, copies: Copies) -> Indices:
        """The index of every byte of one side of some rows, in their order."""
        lengths = copies.length.astype(np.int64)
        before = np.cumsum(lengths) - lengths
        first = starts.astype(np.int64) - self.map.base - before
        return np.repeat(first, lengths) + np.arange(int(lengths.sum()))

    def lacks(self, indices: Indices) -> bool:
        """Whether some bytes are not here."""
        return len(indices) > 0 and bool(indices.min() < 0 or indices.max() >= len(self.bytes))

    def write(self, salt: int, tables: Tables, num_tokens: int, is_last: bool = True) -> None:
        """What a prefill leaves behind. Before its last token, a state of fixed size is another one."""
        for number, group in self.map.held():
            places, numbers = group.at(tables[number], group.computed(num_tokens))
            is_own = is_last or group.state.per_token
            self.bytes[places] = pattern(salt if is_own else salt ^ 1, numbers, group.keys)

    def write_states(self, salt: int, tables: Tables, ahead: Ahead, is_last: bool) -> None:
        """What a prefill leaves behind when it has computed some states of these tokens, and the others not yet."""
        for number, group in self.map.held():
            if group.state.per_token or is_last:
                there = group.numbers <= ahead.num_states
                places, numbers = group.at(tables[number], group.computed(ahead.num_tokens))
                self.bytes[places[:, there]] = pattern(salt, numbers, group.keys[there])

    def wrong_bytes(self, salt: int, tables: Tables, ranges: Sequence[TokenRange]) -> int:
        """How many bytes of what was wanted are not the request's own."""
        found = 0
        for number, group in self.map.held():
            places, numbers = group.at(tables[number], group.seen(ranges[number]))
            found += int(np.count_nonzero(self.bytes[places] != pattern(salt, numbers, group.keys)))
        return found

    def overwrite(self, tables: Tables) -> None:
        """Other bytes in blocks that somebody else has now: no byte stays what it was."""
        for number, group in self.map.held():
            places = group.places[np.asarray(tables[number], np.int64)]
            self.bytes[places] += np.uint8(37)


class BlockPool:
    """Free blocks, last freed first used. With a shared pool all cache groups take from the same blocks."""

    def __init__(self, layout: Layout, shared: bool) -> None:
        self._groups = layout.groups
        self._shared = shared
        self._entry_tokens = _entry_tokens(layout)
        self._free = [list(range(group.num_blocks)) for group in (layout.groups[:1] if shared else layout.groups)]
        self._total = sum(map(len, self._free))

    @property
    def num_used(self) -> int:
        """Blocks that somebody has."""
        return self._total - sum(map(len, self._free))

    def take(self, num_tokens: int) -> tuple[Tables, ...]:
        """Blocks for a request: one block table per group; empty when there are not enough."""
        needed = [self._needed(number, num_tokens) for number in range(len(self._groups))]
        if self._shared and sum(needed) > len(self._free[0]):
            return ()
        if not self._shared and any(want > len(free) for want, free in zip(needed, self._free, strict=True)):
            return ()
        return (tuple(tuple(self._list(n).pop() for _ in range(want)) for n, want in enumerate(needed)),)

    def give_back(self, tables: Tables) -> None:
        """These blocks are free."""
        for number, table in enumerate(tables):
            self._list(number).extend(table)

    def cut(self, tables: Tables, num_tokens: int) -> Tables:
        """The blocks of the first tokens."""
        return tuple(table[: self._needed(number, num_tokens)] for number, table in enumerate(tables))

    def _list(self, number: int) -> list[int]:
        return self._free[0 if self._shared else number]

    def _needed(self, number: int, num_tokens: int) -> int:
        if num_tokens == 0:
            return 0
        block_tokens = self._groups[number].block_tokens * self._entry_tokens[number]
        return -(-num_tokens // block_tokens) if block_tokens else 1


def _entry_tokens(layout: Layout) -> list[int]:
    """Per group, how many tokens an entry stands for; 0 for states of fixed size."""
    named = layout.state_named()
    states = {placement.group: named[placement.state] for placement in layout.placements}
    found = [states.get(number) for number in range(len(layout.groups))]
    return [state.compress_ratio if state and state.per_token else 0 for state in found]
