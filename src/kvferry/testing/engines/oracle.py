"""The oracle: is a target cache what it should be, element by element, whatever the planner thinks?

Every source element gets a value that encodes (state, logical coordinate). The copies are executed with plain slices
on byte buffers. Then each element that the target must hold is looked up by its own placement and compared with the
value that its coordinate should have; every other byte must still be the poison it was before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies

POISON = 0xA5
Tables = Sequence[Sequence[int]]
Coordinate = tuple[int, ...]


@dataclass(slots=True)
class Memory:
    """One rank's regions as byte buffers, addressed by the rank's own addresses."""

    layout: Layout
    buffers: dict[int, NDArray[np.uint8]]

    @classmethod
    def poisoned(cls, layout: Layout) -> Memory:
        """Buffers of our own, full of poison, for layouts whose addresses are made up."""
        return cls(layout, {r.address: np.full(r.size_bytes, POISON, np.uint8) for r in layout.regions})

    def at(self, address: int, length: int) -> NDArray[np.uint8]:
        """A view of bytes that must lie inside one region."""
        for start, buffer in self.buffers.items():
            if start <= address and address + length <= start + len(buffer):
                return buffer[address - start : address - start + length]
        raise AssertionError(f"{address}+{length} leaves every region")


def value_of(state: State, token: int, coordinate: Coordinate) -> bytes:
    """The bytes that one element must hold: they encode its whole identity."""
    identity = f"{state.name}|{token}|{coordinate}".encode()
    return hashlib.blake2b(identity, digest_size=state.item_bytes).digest()


def element_addresses(
    layout: Layout, placement: Placement, tables: Tables, tokens: TokenRange
) -> Iterator[tuple[int, Coordinate, int]]:
    """(token, logical coordinate, address) of every element of a placement; token 0 for a state without tokens."""
    state = layout.state_named()[placement.state]
    group, table = layout.groups[placement.group], tables[placement.group]
    start = layout.regions[placement.region].address + placement.offset
    for token, position in _own(group, tokens) if state.per_token else ((0, 0),):
        slot = position % group.ring_tokens if group.ring_tokens else position
        if not 0 <= table[slot // group.block_tokens] < group.num_blocks:
            continue  # the request has no such block any more
        kernel, slot = divmod(
            table[slot // group.block_tokens] * group.block_tokens + slot % group.block_tokens, tile(group)
        )
        base = start + kernel * placement.block_stride + slot * placement.token_stride
        for coordinate in product(*(range(s.start, s.stop) for s in placement.spans)):
            steps = zip(coordinate, placement.spans, placement.strides, strict=True)
            yield token, coordinate, base + sum((c - span.start) * stride for c, span, stride in steps)


def tile(group: CacheGroup) -> int:
    """Tokens of the smallest block that lies in one piece."""
    return group.block_tokens // group.kernel_blocks


def _own(group: CacheGroup, tokens: TokenRange) -> Iterator[tuple[int, int]]:
    """The tokens of a range that a rank has, and how many it has before each: counted one by one."""
    share, num_before = group.share, 0
    for token in range(tokens.last):
        if token // share.run_tokens % share.num_shares != share.share:
            continue
        if token >= tokens.first:
            yield token, num_before
        num_before += 1


def free_tail(group: CacheGroup, tokens: TokenRange) -> list[TokenRange]:
    """The tokens behind a range that would lie in the same small block as its last one, where that is free."""
    own = list(_own(group, TokenRange(0, tokens.last)))
    if not group.tail_is_free or group.ring_tokens or not own or own[-1][0] < tokens.first:
        return []
    last_block, period = own[-1][1] // tile(group), group.share.num_shares * group.share.run_tokens
    beyond = TokenRange(tokens.last, tokens.last + period * (tile(group) + 1))
    inside = [token for token, position in _own(group, beyond) if position // tile(group) == last_block]
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
        for token, coordinate, address in element_addresses(memory.layout, placement, tables, tokens):
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
        tokens = ranges[placement.group]
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
