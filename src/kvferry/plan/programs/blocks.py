"""The blocks of a request that a transfer touches: checked once, then looked up by token."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import BlockTableError
from kvferry.plan.description.layout import CacheGroup
from kvferry.plan.routing.selection import Indices, positions

BlockTables = Sequence[Sequence[int]]
"""One list of block ids per cache group, in the group's order: entry `i` is for the rank's tokens from
`i * block_tokens` on. Entries whose tokens do not move may be anything. The number of blocks of a group, which is no
block's id, stands for one that is not kept, as of tokens that have left a window."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of some blocks: a cache group, its number, and its side (`source` or `target`) for messages."""

    side: str
    number: int
    cache: CacheGroup

    @property
    def name(self) -> str:
        return f"{self.side} group {self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The ids of the blocks from number `first` of the block table on."""

    cache: CacheGroup
    first: int
    ids: Indices

    def at(self, tokens: Indices) -> tuple[Indices, Indices]:
        """Kernel block and slot of each token."""
        cache, position = self.cache, positions(self.cache, tokens)
        position = position % cache.ring_tokens if cache.ring_tokens else position
        block, slot = self.ids[position // cache.block_tokens - self.first], position % cache.block_tokens
        if cache.kernel_blocks == 1:
            return block, slot
        return block * cache.kernel_blocks + slot // cache.kernel_tokens, slot % cache.kernel_tokens


def checked(tables: BlockTables, owner: Owner, tokens: Indices) -> Blocks:
    """The blocks of the tokens from the first of `tokens` to the last; none when it is empty.

    Raises BlockTableError when ids are no integers, out of range, repeated or too few.
    """
    cache, needed = owner.cache, _needed(owner.cache, tokens)
    if owner.number >= len(tables):
        found, expected = f"{len(tables)} tables", f"group {owner.number}"
        raise BlockTableError(f"{owner.side} block table missing", found=found, expected=expected)
    table = tables[owner.number]
    if len(table) < needed.stop:
        raise BlockTableError(
            f"{owner.name} has too few blocks for the tokens",
            found=f"{len(table)} blocks of {cache.block_tokens} tokens",
            expected=f"at least {needed.stop}",
        )
    ids = _integers(table[needed.start : needed.stop], owner)
    if gone := np.count_nonzero(ids == cache.num_blocks):
        what, found = f"{owner.name} has no blocks for some of the tokens", f"{gone} of {len(ids)} blocks are not kept"
        raise BlockTableError(what, found=found, expected="all of them")
    outside = ids[(ids < 0) | (ids >= cache.num_blocks)]
    if len(outside):
        raise BlockTableError(
            f"{owner.name} names blocks that do not exist",
            found=_listed(outside),
            expected=f"0 <= block < {cache.num_blocks}",
        )
    ordered = np.sort(ids)
    doubles = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(doubles):
        raise BlockTableError(f"{owner.name} names a block twice", found=_listed(doubles))
    return Blocks(cache, needed.start, ids)


def _needed(cache: CacheGroup, tokens: Indices) -> range:
    """Which entries of a block table the tokens from the first to the last need."""
    if not len(tokens):
        return range(0)
    first, last = positions(cache, tokens[[0, -1]]).tolist()
    if cache.ring_tokens:
        first, last = 0, min(last, cache.ring_tokens - 1)
    return range(first // cache.block_tokens, last // cache.block_tokens + 1)


def _listed(ids: Indices) -> str:
    """The first few of some ids."""
    few = np.unique(ids)[:8].tolist()
    return ", ".join(str(one) for one in few) + (" and more" if len(ids) > len(few) else "")


def _integers(ids: Sequence[int], owner: Owner) -> Indices:
    """The ids as an array. Packing is strict, where numpy would round what is no integer, and three times as fast."""
    try:
        return np.frombuffer(struct.pack(f"={len(ids)}q", *ids), np.int64)
    except struct.error as error:
        found = ", ".join(repr(one) for one in ids[:4])
        raise BlockTableError(f"{owner.name}: block ids are 64-bit integers", found=found) from error
