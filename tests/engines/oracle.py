"""The oracle: is a target cache what it should be, element by element, whatever the planner thinks?

Every source element gets a value that encodes (state, logical coordinate). The copies are executed with plain slices
on byte buffers. Then each element that the target must hold is looked up by its own placement and compared with the
value that its coordinate should have; every other byte must still be the poison it was before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.testing.elements import (
    Tables,
    complete_entries,
    element_addresses,
    kernel_tokens,
    own_tokens,
    value_of,
)

POISON = 0xA5


@dataclass(slots=True)
class Memory:
    """One rank's regions as byte buffers, addressed by the rank's own addresses."""

    layout: Layout
    buffers: dict[int, NDArray[np.uint8]]

    @classmethod
    def poisoned(cls, layout: Layout) -> Memory:
        """Buffers of our own, full of poison, for layouts whose addresses are made up."""
        return cls(layout, {r.address: np.full(r.size_bytes, POISON, np.uint8) for r in layout.regions})

    @classmethod
    def poisoned_at(cls, layout: Layout, contents: NDArray[np.uint8], address: int) -> Memory:
        """Regions that lie in `contents`, which is at `address`; all of it is poison now."""
        contents[:] = POISON
        starts = [(region, region.address - address) for region in layout.regions]
        return cls(layout, {region.address: contents[start : start + region.size_bytes] for region, start in starts})

    def at(self, address: int, length: int) -> NDArray[np.uint8]:
        """A view of bytes that must lie inside one region."""
        for start, buffer in self.buffers.items():
            if start <= address and address + length <= start + len(buffer):
                return buffer[address - start : address - start + length]
        raise AssertionError(f"{address}+{length} leaves every region")


def free_tail(group: CacheGroup, tokens: TokenRange) -> list[TokenRange]:
    """The tokens behind a range that would lie in the same small block as its last one, where that is free."""
    own = list(own_tokens(group, TokenRange(0, tokens.last)))
    if not group.tail_is_free or group.ring_tokens or not own or own[-1][0] < tokens.first:
        return []
    last_block, period = own[-1][1] // kernel_tokens(group), group.share.num_shares * group.share.run_tokens
    beyond = TokenRange(tokens.last, tokens.last + period * (kernel_tokens(group) + 1))
    inside = [token for token, position in own_tokens(group, beyond) if position // kernel_tokens(group) == last_block]
    return [TokenRange(inside[0], inside[-1] + 1)] if inside else []


def is_seen(state: State, token: int, following: int) -> bool:
    """Whether the token that comes next, number `following`, may look at an earlier one."""
    if state.window_tokens:
        return following - token < state.window_tokens
    return not state.chunk_tokens or token // state.chunk_tokens == following // state.chunk_tokens


def fill(memory: Memory, tables: Tables, tokens: TokenRange) -> None:
    """Give every element of a source rank that is still seen after these tokens the value of its coordinate."""
    named = memory.layout.state_named()
    for placement in memory.layout.placements:
        state = named[placement.state]
        entries = complete_entries(state, tokens)
        for token, coordinate, address in element_addresses(memory.layout, placement, tables, entries):
            if state.per_token and not is_seen(state, token, tokens.last):
                continue
            value = value_of(state, token, coordinate)
            memory.at(address, state.item_bytes)[:] = np.frombuffer(value, np.uint8)


def execute(copies: Copies, source: Memory, target: Memory, written: Mapping[int, NDArray[np.uint8]]) -> None:
    """Copy row by row and count, per target byte, how often it was written (`written`: region address -> counts)."""
    for source_address, target_address, length in zip(copies.source, copies.target, copies.length, strict=True):
        target.at(int(target_address), int(length))[:] = source.at(int(source_address), int(length))
        for start, counts in written.items():
            if start <= target_address < start + len(counts):
                offset = int(target_address) - start
                counts[offset : offset + int(length)] += 1


def expect(
    memory: Memory, tables: Tables, ranges: Sequence[TokenRange], written: Mapping[int, NDArray[np.uint8]]
) -> None:
    """Raise AssertionError unless the target holds exactly the requested elements, each written once, nothing else.

    `ranges` has one range per cache group; of a state with a window or chunks, only what is still seen is expected.
    Where the tail of a block is free, it may hold anything.
    """
    named = memory.layout.state_named()
    wanted = {start: np.zeros_like(counts) for start, counts in written.items()}
    free = {start: np.zeros(len(counts), np.bool_) for start, counts in written.items()}
    for placement in memory.layout.placements:
        state = named[placement.state]
        tokens = complete_entries(state, ranges[placement.group])
        for token, coordinate, address in element_addresses(memory.layout, placement, tables, tokens):
            if state.per_token and not is_seen(state, token, tokens.last):
                continue
            found = memory.at(address, state.item_bytes).tobytes()
            if found != value_of(state, token, coordinate):
                raise AssertionError(f"{state.name} token {token} {coordinate}: wrong bytes at {address}")
            start = memory.layout.regions[placement.region].address
            wanted[start][address - start : address - start + state.item_bytes] = 1
        _mark_free(memory.layout, placement, tables, tokens, free)
    for start, counts in written.items():
        _check_written(counts, wanted[start], free[start], memory.buffers[start])


def expect_tokens(memory: Memory, tables: Tables, num_tokens: int) -> None:
    """Raise AssertionError unless the target holds exactly the elements of these tokens, whoever has written them."""
    wanted = {start: np.zeros(len(buffer), np.uint8) for start, buffer in memory.buffers.items()}
    layout, tokens = memory.layout, TokenRange(0, num_tokens)
    for placement in layout.placements:
        start = layout.regions[placement.region].address
        state = layout.state_named()[placement.state]
        for _, _, address in element_addresses(layout, placement, tables, complete_entries(state, tokens)):
            wanted[start][address - start : address - start + state.item_bytes] = 1
    expect(memory, tables, [tokens] * len(layout.groups), wanted)


def _mark_free(
    layout: Layout, placement: Placement, tables: Tables, tokens: TokenRange, free: dict[int, NDArray[np.bool_]]
) -> None:
    """Note the bytes behind the tokens of a placement that may hold anything."""
    state, start = layout.state_named()[placement.state], layout.regions[placement.region].address
    for tail in free_tail(layout.groups[placement.group], tokens) if state.per_token else ():
        for _, _, address in element_addresses(layout, placement, tables, tail):
            free[start][address - start : address - start + state.item_bytes] = True


def _check_written(
    counts: NDArray[np.uint8], wanted: NDArray[np.uint8], free: NDArray[np.bool_], buffer: NDArray[np.uint8]
) -> None:
    """Each wanted byte was written once; nothing else was touched but what is free."""
    if np.any(counts > 1) or not np.array_equal(counts[~free], wanted[~free]):
        raise AssertionError(f"bytes written {np.unique(counts - wanted)} times too often")
    if np.any(buffer[(wanted == 0) & ~free] != POISON):
        raise AssertionError("bytes outside the request were touched")
