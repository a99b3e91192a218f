"""What is planned for several stretches at once is what is found stretch by stretch, with every row sorted."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BlockTableError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import BlockStrides, RegionStarts, Section, Strides, bind
from kvferry.plan.programs.request import Places, bytes_at, copies_for, places_for
from kvferry.plan.programs.stretches import stretches, unit_tokens
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots.packed_slots import packed
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest
from kvferry.plan.strategy.strategies import Side, Strategy, staged

engines = st.one_of(scenarios(), handmade())
MODEL = attention(2, 4, 8, "float16", 2)
BLOCK_TOKENS = 4


def joined(rows, staging, borders):
    """Rows in the order of their staging addresses, as few as there can be: (source, target, length)."""
    order = np.argsort(getattr(rows, staging))
    found = []
    for source, target, length in zip(
        *(c[order].tolist() for c in (rows.source, rows.target, rows.length)), strict=True
    ):
        address = target if staging == "source" else source
        if (
            found
            and address not in borders
            and (source, target) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2])
        ):
            found[-1][2] += length
        else:
            found.append([source, target, length])
    return found


@settings(max_examples=200, deadline=None)
@given(engines, st.sampled_from(Side), st.integers(1, 3))
def test_it_is_what_sorting_finds(scenario, side, num_units):
    found = route(scenario.sources, scenario.targets)
    for source_rank, rank in found.pairs():
        source, target = scenario.sources[source_rank], scenario.targets[rank]
        program = bind(found.between(source_rank, rank), source, target)
        borders = set((program.starts.source if side is Side.SOURCE else program.starts.target).tolist())
        tables = scenario.source_tables[source_rank], scenario.target_tables[rank]
        cut = stretches(scenario.ranges, num_units * unit_tokens(program))
        places = places_for(program, tables, scenario.ranges, cut)
        ours = packed(places, len(cut), program.starts, side)
        assert len(ours) in (0, len(cut))
        for each, stretch, size in zip(ours, cut, bytes_at(places, len(cut)), strict=False):
            copies = copies_for(program, *tables, scenario.ranges, stretch)
            assert size == copies.num_bytes
            theirs = staged(copies, Strategy.PACK, max(1, size), program.starts, side)
            rows, staging = (theirs.gather, "target") if side is Side.SOURCE else (theirs.scatter, "source")
            assert joined(rows_of(each), staging, borders) == joined(rows, staging, borders)


def rig(memory_format, table, num_tokens=12 * BLOCK_TOKENS, slot_blocks=1):
    """Two source ranks into one target rank; the first pair of ranks."""
    shapes = (EngineShape(2, 1, BLOCK_TOKENS, 32, memory_format), EngineShape(1, 1, BLOCK_TOKENS, 32, memory_format))
    sources, targets = (describe(MODEL, shape, at << 40) for shape, at in zip(shapes, (1, 2), strict=True))
    program = bind(route(sources, targets).between(0, 0), sources[0], targets[0])
    slot_bytes = slot_blocks * BLOCK_TOKENS * MODEL.bytes_per_token // 2
    return StagedRequest(program, (table,), (table,), (TokenRange(0, num_tokens),), Strategy.PACK, slot_bytes)


TABLE = (7, 3, 11, 2, 19, 5, 23, 29, 13, 17, 31, 1)


@pytest.mark.parametrize("memory_format", ["token-major", "head-major", "block-major"])
@pytest.mark.parametrize("table", [TABLE, tuple(range(5, 17))], ids=["in any order", "adjacent"])
def test_no_row_has_to_be_sorted_in_formats_that_engines_have(memory_format, table):
    request = rig(memory_format, table)
    cut = stretches(request.ranges, BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), request.ranges, cut)
    assert all(len(packed(places, len(cut), request.program.starts, side)) == 12 for side in Side)


def test_a_part_of_a_block_with_heads_outside_of_tokens_has_to_be_sorted():
    request = rig("head-major", TABLE)
    cut = stretches((TokenRange(1, 6),), 2 * BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), (TokenRange(1, 6),), cut)
    assert all(packed(places, 1, request.program.starts, side) == () for side in Side)


@pytest.mark.parametrize("source", [[0, 8, 16, 100, 200, 216], [0, 8, 16, 100, 108, 208], [0, 8, 24, 100, 108, 116]])
def test_strips_that_are_not_alike_have_to_be_sorted(source):
    """Two strips of three rows. At the source they are one run and three, one and two, or two and one."""
    target = np.array([0, 10, 20, 1000, 1010, 1020], np.uint64)
    strides = Strides(BlockStrides(1 << 20, 0), BlockStrides(64, 0))
    section = Section(strides, 8, np.array(source, np.uint64), target, 6)
    where = (np.array([3, 5]), np.array([0, 0]))
    starts = RegionStarts(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    places = [Places((section,), where, where, np.array([0, 1]))]
    assert packed(places, 2, starts, Side.SOURCE) == ()
    assert all(len(each) == 1 for each in packed(places, 2, starts, Side.TARGET))


@pytest.mark.parametrize(
    ("side", "copies", "staging"), [("source", "gather", "target"), ("target", "scatter", "source")]
)
def test_only_stretches_that_are_computed_are_planned(side, copies, staging):
    """The table of a prompt that is still computed is short."""
    whole = SlotPlan(rig("token-major", TABLE), Side(side))
    for num_blocks in range(1, len(TABLE) + 1):
        short = replace(rig("token-major", TABLE), source_tables=(TABLE[:num_blocks],))
        plan = SlotPlan(short, Side(side), num_blocks * BLOCK_TOKENS)
        assert len(plan.stretches) == 12
        for number in range(num_blocks):
            for ours, theirs in zip(plan.slots(number), whole.slots(number), strict=True):
                assert ours.num_bytes == theirs.num_bytes
                found = [joined(rows_of(getattr(slot, copies)), staging, ()) for slot in (ours, theirs)]
                assert found[0] == found[1] != []
        if num_blocks < len(TABLE):
            with pytest.raises(BlockTableError, match="too few blocks"):
                plan.slots(num_blocks)


@pytest.mark.parametrize("may_be_many", [True, False])
def test_stretches_are_planned_together_and_once(monkeypatch, may_be_many):
    """Unless each of them has a great many rows."""
    calls = []

    def counted(*arguments):
        calls.append(len(arguments[3]))
        return places_for(*arguments)

    monkeypatch.setattr("kvferry.plan.slots.slot_plan.places_for", counted)
    monkeypatch.setattr("kvferry.plan.slots.slot_plan.TOGETHER", 4)
    if not may_be_many:
        monkeypatch.setattr("kvferry.plan.slots.slot_plan.MAX_ROWS_TOGETHER", 4)
    plan = SlotPlan(rig("token-major", TABLE), Side.TARGET)
    for number in range(len(plan.stretches)):
        for _ in range(2):
            assert len(plan.slots(number)) == 1
    assert calls == ([1, 4, 4, 3] if may_be_many else [1] * 12)


def test_bytes_are_counted_for_each_stretch():
    request = rig("token-major", TABLE, num_tokens=10)
    cut = stretches(request.ranges, BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), request.ranges, cut)
    counted = bytes_at(places, len(cut))
    found = [copies_for(request.program, (TABLE,), (TABLE,), request.ranges, each).num_bytes for each in cut]
    assert counted == found
    assert all(first <= second for second, first in pairwise(found))


def test_stretches_of_many_slots_are_planned_one_by_one(monkeypatch):
    """A peer says how large slots are; each is a record."""
    asked = []
    monkeypatch.setattr(
        "kvferry.plan.slots.slot_plan.places_for", lambda *given: asked.append(len(given[3])) or places_for(*given)
    )
    request = rig("token-major", TABLE)
    plan = SlotPlan(replace(request, slot_bytes=request.slot_bytes // 8), Side.TARGET)
    assert [len(plan.slots(number)) for number in range(len(plan.stretches))] == [8] * 12
    assert asked == [1] * 12


def test_a_stretch_that_does_not_fit_is_the_only_one_that_is_sorted(monkeypatch):
    """Like the last of a model with a large state of fixed size: here the others are said to be smaller."""
    sorted_ones = []

    def counted(*given):
        sorted_ones.append(given[4])
        return copies_for(*given)

    def with_a_large_last(places, num_stretches):
        sizes = bytes_at(places, num_stretches)
        return [*sizes[:-1], sizes[-1] * (1 + (num_stretches > 1))]

    monkeypatch.setattr("kvferry.plan.slots.slot_plan.copies_for", counted)
    monkeypatch.setattr("kvferry.plan.slots.slot_plan.bytes_at", with_a_large_last)
    plan = SlotPlan(rig("token-major", TABLE), Side.TARGET)
    for number in range(len(plan.stretches)):
        assert len(plan.slots(number)) == 1
    assert sorted_ones == [plan.stretches[-1]]
