"""The invariants I1-I7 of docs/design/plan.md between arrays of JAX on three devices and tensors of torch on two ranks,
with real programs that copy. What they say of planning alone is in tests/plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agents_of_engine import model_of
from engines import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_engine import JaxEngine
from mover_side import Side
from torch_engine import TorchEngine

from kvferry.jax_caches import FIRST_ADDRESS
from kvferry.layout import EngineShape, describe
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest
from kvferry.plan.strategy.strategies import Side as PlanSide
from kvferry.plan.strategy.strategies import Strategy
from kvferry.staging.jax_arrays.units import units_of

DTYPE = "bfloat16"
MODEL = model_of(DTYPE)
JAX_SHAPE = EngineShape(3, 1, block_tokens=4, num_blocks=16, format="token-major")
TORCH_SHAPE = EngineShape(2, 1, block_tokens=6, num_blocks=11, format="head-major")
MAX_TOKENS = 40
some = settings(max_examples=12)


@dataclass
class Pair:
    """`sides` are the movers of the ranks of JAX, which reach the tensors as well."""

    arrays: JaxEngine
    tensors: TorchEngine
    sides: list[Side]

    def engines(self, from_jax: bool) -> tuple[Any, Any]:
        """Source and target."""
        both = self.arrays, self.tensors
        return both if from_jax else both[::-1]

    def move(self, from_jax: bool, source_rank: int, target_rank: int, rows: Copies) -> None:
        side = self.sides[source_rank if from_jax else target_rank]
        assert side.move(rows.source, rows.target, rows.length) == ""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    arrays, tensors = JaxEngine(MODEL, JAX_SHAPE, DTYPE), TorchEngine(MODEL, TORCH_SHAPE, DTYPE)
    sides = [Side(arrays.caches, rank, near=tensors.memories) for rank in range(JAX_SHAPE.tensor_parallel)]
    yield Pair(arrays, tensors, sides)
    for side in sides:
        side.close()
    tensors.close()


@dataclass(frozen=True)
class Request:
    """Block tables of both engines, for a range of tokens."""

    of_jax: tuple[int, ...]
    of_torch: tuple[int, ...]
    tokens: TokenRange

    def tables(self, from_jax: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
        both = (self.of_jax,), (self.of_torch,)
        return both if from_jax else both[::-1]


@st.composite
def requests(draw) -> Request:
    last = draw(st.integers(1, MAX_TOKENS))
    tables = (
        tuple(draw(st.permutations(range(shape.num_blocks)))[: -(-last // shape.block_tokens)])
        for shape in (JAX_SHAPE, TORCH_SHAPE)
    )
    return Request(*tables, TokenRange(draw(st.integers(0, last - 1)), last))


def programs_of(source: Any, target: Any) -> list[tuple[int, int, Program]]:
    found = route(source.layouts, target.layouts)
    return [
        (a, b, bind(found.between(a, b), source.layouts[a], target.layouts[b]))
        for b in range(len(target.layouts))
        for a in found.sources_of(b)
    ]


def prepare(source: Any, target: Any, request: Request, from_jax: bool) -> None:
    """The source has the tokens of a request, and the target poison."""
    for engine in (source, target):
        for picture in engine.pictures:
            for buffer in picture.buffers.values():
                buffer[:] = oracle.POISON
    for picture in source.pictures:
        oracle.fill(picture, request.tables(from_jax)[0], TokenRange(0, request.tokens.last))
    source.upload()
    target.upload()


def contents(engine: Any) -> list[np.ndarray]:
    engine.download()
    return [buffer.copy() for picture in engine.pictures for buffer in picture.buffers.values()]


def are_equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("from_jax", [True, False])
@some
@given(request=requests())
def test_i1_i2_i3_each_requested_element_arrives_once_and_nothing_else_is_touched(pair, from_jax, request):
    source, target = pair.engines(from_jax)
    prepare(source, target, request, from_jax)
    num_compiled = pair.arrays.caches.num_compiled
    counts = [{at: np.zeros(len(buffer), np.uint8) for at, buffer in each.buffers.items()} for each in target.pictures]
    for a, b, program in programs_of(source, target):
        rows = copies_for(program, *request.tables(from_jax), (request.tokens,))
        pair.move(from_jax, a, b, rows)
        for address, length in zip(rows.target.tolist(), rows.length.tolist(), strict=True):
            start = max(at for at in counts[b] if at <= address)
            counts[b][start][address - start : address - start + length] += 1
    target.download()
    for picture, written in zip(target.pictures, counts, strict=True):
        oracle.expect(picture, request.tables(from_jax)[1], (request.tokens,), written)
    assert pair.arrays.caches.num_compiled == num_compiled


def test_i4_who_sends_what_does_not_depend_on_where_arrays_are(pair):
    arrays, tensors = pair.engines(True)
    in_host = describe(MODEL, JAX_SHAPE, 1 << 20)
    assert min(region.address for layout in arrays.layouts for region in layout.regions) >= FIRST_ADDRESS
    assert route(arrays.layouts, tensors.layouts) == route(in_host, tensors.layouts)
    assert route(tensors.layouts, arrays.layouts) == route(tensors.layouts, in_host)


@some
@given(request=requests())
def test_i5_what_comes_back_is_what_was_there(pair, request):
    """Exchanging the roles gives the transposed rows."""
    arrays, tensors = pair.engines(True)
    whole = Request(request.of_jax, request.of_torch, TokenRange(0, request.tokens.last))
    prepare(arrays, tensors, whole, True)
    before = contents(arrays)
    there = {(a, b): program for a, b, program in programs_of(arrays, tensors)}
    back = {(b, a): program for a, b, program in programs_of(tensors, arrays)}
    assert there.keys() == back.keys()
    for (a, b), program in there.items():
        pair.move(True, a, b, copies_for(program, *whole.tables(True), (whole.tokens,)))
    for picture in arrays.pictures:
        for buffer in picture.buffers.values():
            buffer[:] = oracle.POISON
    arrays.upload()
    for (a, b), program in back.items():
        rows = copies_for(program, *whole.tables(False), (whole.tokens,))
        assert byte_pairs(rows) == {
            (target, source)
            for source, target in byte_pairs(copies_for(there[a, b], *whole.tables(True), (whole.tokens,)))
        }
        pair.move(False, b, a, rows)
    assert are_equal(contents(arrays), before)


def byte_pairs(rows: Copies) -> set[tuple[int, int]]:
    columns = zip(rows.source.tolist(), rows.target.tolist(), rows.length.tolist(), strict=True)
    return {(source + byte, target + byte) for source, target, length in columns for byte in range(length)}


@pytest.mark.parametrize("from_jax", [True, False])
@some
@given(request=requests(), seed=st.integers(0, 1000))
def test_i6_however_rows_are_cut_and_ordered_the_same_bytes_move(pair, from_jax, request, seed):
    """As planned, and unit by unit."""
    source, target = pair.engines(from_jax)
    found = []
    for is_cut in (False, True):
        prepare(source, target, request, from_jax)
        for a, b, program in programs_of(source, target):
            rows = copies_for(program, *request.tables(from_jax), (request.tokens,))
            unit = units_of(pair.arrays.layouts[0], 0)[1]
            pair.move(from_jax, a, b, cut(rows, unit, seed) if is_cut else rows)
        found.append(contents(target))
    assert are_equal(*found)


def cut(rows: Copies, unit: int, seed: int) -> Copies:
    """Into units, in any order."""
    places = [
        (source + at, target + at, unit)
        for source, target, length in zip(rows.source.tolist(), rows.target.tolist(), rows.length.tolist(), strict=True)
        for at in range(0, length, unit)
    ]
    shuffled = np.random.default_rng(seed).permutation(np.array(places, np.uint64))
    return Copies(*(np.ascontiguousarray(column) for column in shuffled.T), pieces=len(places))


@pytest.mark.parametrize(
    ("from_jax", "strategy"), [(True, Strategy.PACK), (False, Strategy.PACK), (False, Strategy.SCATTER)]
)
@some
@given(request=requests(), slot_bytes=st.integers(100, 2000).map(lambda items: 2 * items))
def test_i7_slots_leave_what_direct_copies_leave(pair, from_jax, strategy, request, slot_bytes):
    """Direct ones are numpy's, between what the host knows of either memory. Arrays are never read without slots. Small
    slots end amid a head's vector."""
    source, target = pair.engines(from_jax)
    prepare(source, target, request, from_jax)
    straight = [oracle.Memory.poisoned(layout) for layout in target.layouts]
    for a, b, program in programs_of(source, target):
        rows = copies_for(program, *request.tables(from_jax), (request.tokens,))
        oracle.execute(rows, source.pictures[a], straight[b], {})
        staged = StagedRequest(program, *request.tables(from_jax), (request.tokens,), strategy, slot_bytes)
        through_slots(pair, from_jax, a, b, staged)
    assert are_equal(contents(target), [buffer for memory in straight for buffer in memory.buffers.values()])


def through_slots(pair: Pair, from_jax: bool, source_rank: int, target_rank: int, request: StagedRequest) -> None:
    """One slot on either side, which is used again and again: programs copy at the side of the arrays, numpy at the
    other one and between the slots."""
    source, target = pair.engines(from_jax)
    side = pair.sides[source_rank if from_jax else target_rank]
    in_host = np.zeros(len(side.host), np.uint8)
    ours, theirs = (side.host, in_host) if from_jax else (in_host, side.host)
    plans = [SlotPlan(request, each) for each in PlanSide]
    for at_source, at_target in zip(*map(slots_of, plans), strict=True):
        gather, wire, scatter = rows_of(at_source.gather), at_target.wire, rows_of(at_target.scatter)
        if from_jax:
            assert side.move(gather.source, gather.target + side.address, gather.length) == ""
        else:
            carry(gather, source.pictures[source_rank].at, slot(ours))
        carry(wire, slot(ours) if len(gather) else source.pictures[source_rank].at, slot(theirs))
        if from_jax:
            carry(scatter, slot(theirs), target.pictures[target_rank].at)
        else:
            assert side.move(scatter.source + side.address, scatter.target, scatter.length) == ""


def slots_of(plan: SlotPlan) -> list[Any]:
    return [slot for number in range(len(plan.stretches)) for slot in plan.slots(number)]


def slot(memory: np.ndarray) -> Any:
    return lambda at, length: memory[at : at + length]


def carry(rows: Copies, read: Any, write: Any) -> None:
    for source, target, length in zip(rows.source.tolist(), rows.target.tolist(), rows.length.tolist(), strict=True):
        write(target, length)[:] = read(source, length)
