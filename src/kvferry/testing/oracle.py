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

from kvferry.plan.copies import Copies
from kvferry.plan.layout import Layout, Placement, State, TokenRange

__all__ = ["POISON", "Memory", "element_addresses", "execute", "expect", "fill"]

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
    group = layout.groups[placement.group]
    start = layout.regions[placement.region].address + placement.offset
    for token in range(tokens.first, tokens.last) if state.per_token else (0,):
        slot = token % group.ring_tokens if group.ring_tokens else token
        block = tables[placement.group][slot // group.block_tokens]
        base = start + block * placement.block_stride + slot % group.block_tokens * placement.token_stride
        for coordinate in product(*(range(s.start, s.stop) for s in placement.spans)):
            steps = zip(coordinate, placement.spans, placement.strides, strict=True)
            yield token, coordinate, base + sum((c - span.start) * stride for c, span, stride in steps)


def fill(memory: Memory, tables: Tables, tokens: TokenRange) -> None:
    """Give every element of a source rank the value of its coordinate."""
    named = memory.layout.state_named()
    for placement in memory.layout.placements:
        state = named[placement.state]
        for token, coordinate, address in element_addresses(memory.layout, placement, tables, tokens):
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
    memory: Memory,
    tables: Tables,
    tokens: TokenRange,
    written: Mapping[int, NDArray[np.uint8]],
    windows: Mapping[str, int],
) -> None:
    """Raise AssertionError unless the target holds exactly the requested elements, each written once, nothing else.

    `windows` has the sliding window of each state that has one: only its last tokens but one are expected.
    """
    named = memory.layout.state_named()
    wanted = {start: np.zeros_like(counts) for start, counts in written.items()}
    for placement in memory.layout.placements:
        state = named[placement.state]
        seen = windows.get(state.name, tokens.last + 1) - 1
        held = TokenRange(max(tokens.first, tokens.last - seen), tokens.last)
        for token, coordinate, address in element_addresses(memory.layout, placement, tables, held):
            found = memory.at(address, state.item_bytes).tobytes()
            if found != value_of(state, token, coordinate):
                raise AssertionError(f"{state.name} token {token} {coordinate}: wrong bytes at {address}")
            start = memory.layout.regions[placement.region].address
            wanted[start][address - start : address - start + state.item_bytes] = 1
    for start, counts in written.items():
        if not np.array_equal(counts, wanted[start]):
            raise AssertionError(f"region {start}: bytes written {np.unique(counts - wanted[start])} times too often")
        untouched = memory.buffers[start][wanted[start] == 0]
        if np.any(untouched != POISON):
            raise AssertionError(f"region {start}: bytes outside the request were touched")
