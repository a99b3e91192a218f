"""What the benchmark of unequal tensor parallelism moves, and the rows in which its peers would move it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from mixed_tp_nixl import PROGRESS_S
from numpy.typing import NDArray

from kvferry import AgentConfig
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.routing.route import route
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest, any_tables
from kvferry.plan.strategy.strategies import Side, Strategy

__all__ = ["BLOCK_TOKENS", "FORMATS", "NUM_BLOCKS", "PAIRS", "TOKENS", "Request", "Rig", "logical", "pattern", "write"]

NUM_LAYERS, NUM_HEADS, HEAD_DIM, ITEM_BYTES = 8, 12, 128, 2
MODEL = attention(NUM_LAYERS, NUM_HEADS, HEAD_DIM, "bfloat16", ITEM_BYTES)
BLOCK_TOKENS = 16
NUM_BLOCKS = 640
PAIRS = ((2, 2), (4, 2), (2, 4), (3, 2))
FORMATS = ("token-major", "head-major")
TOKENS = (256, 2048, 8192)
TOKEN_BYTES = HEAD_DIM * ITEM_BYTES
"""One head of one token of a key or a value."""


@dataclass(frozen=True, slots=True)
class Request:
    """So many tokens, in blocks in random order or one after the other; both sides draw their own from a seed."""

    num_tokens: int
    ids: str

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // BLOCK_TOKENS

    @property
    def ranges(self) -> tuple[TokenRange, ...]:
        return (TokenRange(0, self.num_tokens),)

    def table(self, side: str) -> tuple[int, ...]:
        if self.ids == "adjacent":
            first = {"source": 5, "target": 17}[side]
            return tuple(range(first, first + self.num_blocks))
        return tuple(random.Random(f"{side} {self.num_tokens}").sample(range(NUM_BLOCKS), self.num_blocks))


@dataclass(frozen=True, slots=True)
class Rig:
    """Two engines: rank 0 of the target with all ranks of the source, and the transport of ours between them. They are
    on one host, or the sources on the far one of `two_hosts`."""

    source_parallel: int
    target_parallel: int
    format: str
    transport: str = "nixl"
    are_apart: bool = False

    @property
    def copies_alone(self) -> bool:
        """Whether ours is a transport that reads a peer of this host without NIXL: it is measured by itself as well."""
        return self.transport != "nixl" and not self.are_apart

    @property
    def nap_s(self) -> float:
        """How long NIXL naps between two calls that make progress for peers."""
        return 0.0 if self.are_apart else PROGRESS_S

    @property
    def source_shape(self) -> EngineShape:
        return EngineShape(self.source_parallel, 1, BLOCK_TOKENS, NUM_BLOCKS, self.format)

    @property
    def target_shape(self) -> EngineShape:
        return EngineShape(self.target_parallel, 1, BLOCK_TOKENS, NUM_BLOCKS, self.format)

    @property
    def readable(self) -> range:
        """The source ranks that hold heads of target rank 0."""
        num_heads = NUM_HEADS // self.target_parallel
        return range(-(-num_heads * self.source_parallel // NUM_HEADS))

    def source_layouts(self, rank: int, address: int) -> tuple[Layout, ...]:
        """Those of all ranks, with rank `rank` at an address; where the others are does not matter here."""
        return _at(self.source_shape, rank, address)

    def target_layouts(self, address: int) -> tuple[Layout, ...]:
        return _at(self.target_shape, 0, address)

    def program(self, rank: int, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Program:
        return bind(route(sources, targets).between(rank, 0), sources[rank], targets[0])

    def slots(self, rank: int, source_address: int, target_address: int, request: Request) -> SlotPlan:
        """What goes from one source rank to target rank 0 with `pack`, as the side plans it whose address is given."""
        sources, targets = self.source_layouts(rank, source_address), self.target_layouts(target_address)
        tables = request.table("source"), request.table("target")
        if not source_address:
            tables = any_tables(sources[rank], request.num_tokens)[0], tables[1]
        return SlotPlan(
            StagedRequest(
                program=self.program(rank, sources, targets),
                source_tables=(tables[0],),
                target_tables=(tables[1],),
                ranges=request.ranges,
                strategy=Strategy.PACK,
                slot_bytes=self.slot_bytes,
            ),
            Side.SOURCE if source_address else Side.TARGET,
        )

    @property
    def slot_bytes(self) -> int:
        return AgentConfig("x").staging.slot_bytes

    def rows(self, rank: int, addresses: tuple[int, int], request: Request, *, by_token: bool) -> Copies:
        """One row per token (else per block where its bytes follow one another on both sides), layer, key and value,
        and run of heads, from one source rank: not joined any further. `addresses` are the two ranks' memories."""
        source = self.source_layouts(rank, addresses[0])[rank]
        target = self.target_layouts(addresses[1])[0]
        parts = list(_rows(source, target, request, by_token=by_token))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Copies(columns[0], columns[1], columns[2], len(columns[0]))


def _at(shape: EngineShape, rank: int, address: int) -> tuple[Layout, ...]:
    """All ranks of an engine, of which one lies at an address; 0 for anywhere."""
    layouts = list(describe(MODEL, shape, 1 << 52))
    if address:
        found = layouts[rank]
        shift = address - found.regions[0].address
        regions = tuple(replace(region, address=region.address + shift) for region in found.regions)
        layouts[rank] = replace(found, regions=regions)
    return tuple(layouts)


def _rows(source: Layout, target: Layout, request: Request, *, by_token: bool) -> Iterator[tuple[NDArray, ...]]:
    tokens = np.arange(request.num_tokens)
    tables = [np.array(request.table(side)) for side in ("source", "target")]
    places = target.placement_of()
    for placed in source.placements:
        pair = (placed, source), (places[placed.state], target)
        spans = [each.spans[0] for each, _ in pair]
        first, stop = max(span.start for span in spans), min(span.stop for span in spans)
        is_dense = all(each.strides[0] == TOKEN_BYTES for each, _ in pair)
        # A block is one piece when all its tokens follow one another on both sides.
        num_bytes = (stop - first) * TOKEN_BYTES
        whole = all(each.token_stride == num_bytes for each, _ in pair)
        if not is_dense:
            whole, num_bytes = True, num_bytes * BLOCK_TOKENS
        elif whole:
            num_bytes *= BLOCK_TOKENS
        if whole and not by_token:
            starts, heads, length = tokens[::BLOCK_TOKENS], [first], num_bytes
        elif is_dense:
            starts, heads, length = tokens, [first], (stop - first) * TOKEN_BYTES
        else:
            starts, heads, length = tokens, list(range(first, stop)), TOKEN_BYTES
        for head in heads:
            columns = [
                layout.regions[each.region].address
                + each.offset
                + (head - each.spans[0].start) * each.strides[0]
                + table[starts // BLOCK_TOKENS] * each.block_stride
                + starts % BLOCK_TOKENS * each.token_stride
                for (each, layout), table in zip(pair, tables, strict=True)
            ]
            yield (*(column.astype(np.uint64) for column in columns), np.full(len(starts), length, np.uint64))


# --- the oracle: plain indexing, no planner ---


def pattern(rank: int, memory: NDArray[np.uint8]) -> None:
    """What a source rank's memory holds, from its number alone."""
    words = memory.view(np.uint64)
    dice, step = np.random.default_rng(rank), 1 << 21
    for first in range(0, len(words), step):
        part = words[first : first + step]
        part[:] = dice.integers(0, 1 << 64, len(part), np.uint64)


def _by_token(memory: NDArray[np.uint8], memory_format: str) -> NDArray[np.uint16]:
    """A rank's memory as (layer and kind, block, token, head, dim)."""
    items = memory.view(np.uint16)
    if memory_format == "token-major":
        return items.reshape(2 * NUM_LAYERS, NUM_BLOCKS, BLOCK_TOKENS, -1, HEAD_DIM)
    return items.reshape(2 * NUM_LAYERS, NUM_BLOCKS, -1, BLOCK_TOKENS, HEAD_DIM).swapaxes(2, 3)


def logical(memory: NDArray[np.uint8], memory_format: str, table: tuple[int, ...]) -> NDArray[np.uint16]:
    """A request's elements as (layer and kind, block, token, head, dim), in the order of its tokens."""
    return _by_token(memory, memory_format)[:, list(table)]


def write(memory: NDArray[np.uint8], memory_format: str, table: tuple[int, ...], elements: NDArray[np.uint16]) -> None:
    """Put a request's elements where they belong."""
    _by_token(memory, memory_format)[:, list(table)] = elements
