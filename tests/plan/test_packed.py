"""What is planned for several stretches at once is what is found stretch by stretch, with every row sorted."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BlockTableError
from kvferry.plan.describe import EngineShape, describe
from kvferry.plan.model import attention
from kvferry.plan.packed import packed
from kvferry.plan.program import bind
from kvferry.plan.request import bytes_at, copies_for, places_for
from kvferry.plan.route import route
from kvferry.plan.slots import TOGETHER, SlotPlan, StagedRequest, region_starts
from kvferry.plan.staged import Side, Staging, Strategy, staged
from kvferry.plan.stretch import stretches, unit_tokens
from kvferry.plan.tokens import TokenRange
from kvferry.testing.strategies import handmade, scenarios

engines = st.one_of(scenarios(), handmade())
MODEL = attention(2, 4, 8, "float16", 2)
BLOCK_TOKENS = 4


def assert_same_rows(ours, theirs):
    for column in ("source", "target", "length"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column))


def assert_same_stages(ours, theirs):
    for stage in ("gather", "wire", "scatter"):
        assert_same_rows(getattr(ours, stage), getattr(theirs, stage))


@settings(max_examples=200, deadline=None)
@given(engines, st.sampled_from(Side), st.integers(1, 3), st.integers(1, 3000))
def test_it_is_what_sorting_finds(scenario, side, num_units, slot_bytes):
    found = route(scenario.sources, scenario.targets)
    for source_rank, rank in found.pairs():
        source, target = scenario.sources[source_rank], scenario.targets[rank]
        program, starts = bind(found.between(source_rank, rank), source, target), region_starts(source, target)
        tables = scenario.source_tables[source_rank], scenario.target_tables[rank]
        cut = stretches(scenario.ranges, num_units * unit_tokens(program))
        places = places_for(program, tables, scenario.ranges, cut)
        num_bytes = bytes_at(places, len(cut))
        ours = packed(places, num_bytes, starts, slot_bytes, side)
        assert len(ours) in (0, len(cut))
        for stages, stretch, size in zip(ours, cut, num_bytes, strict=False):
            copies = copies_for(program, *tables, scenario.ranges, stretch)
            assert size == copies.num_bytes
            assert_same_stages(stages, staged(copies, Strategy.PACK, Staging(0, 0, slot_bytes), starts, side))


def rig(memory_format, table, num_tokens=12 * BLOCK_TOKENS, slot_blocks=1):
    """Two source ranks into one target rank; the first pair of ranks."""
    shapes = (EngineShape(2, 1, BLOCK_TOKENS, 32, memory_format), EngineShape(1, 1, BLOCK_TOKENS, 32, memory_format))
    sources, targets = (describe(MODEL, shape, at << 40) for shape, at in zip(shapes, (1, 2), strict=True))
    program = bind(route(sources, targets).between(0, 0), sources[0], targets[0])
    slot_bytes = slot_blocks * BLOCK_TOKENS * MODEL.bytes_per_token // 2
    starts = region_starts(sources[0], targets[0])
    return StagedRequest(program, (table,), (table,), (TokenRange(0, num_tokens),), Strategy.PACK, slot_bytes, starts)


TABLE = (7, 3, 11, 2, 19, 5, 23, 29, 13, 17, 31, 1)


@pytest.mark.parametrize("memory_format", ["token-major", "head-major", "block-major"])
@pytest.mark.parametrize("table", [TABLE, tuple(range(5, 17))], ids=["in any order", "adjacent"])
def test_no_row_has_to_be_sorted_in_formats_that_engines_have(memory_format, table):
    request = rig(memory_format, table)
    cut = stretches(request.ranges, BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), request.ranges, cut)
    num_bytes = bytes_at(places, len(cut))
    assert len(packed(places, num_bytes, request.starts, request.slot_bytes, Side.BOTH)) == 12


def test_a_part_of_a_block_with_heads_outside_of_tokens_has_to_be_sorted():
    request = rig("head-major", TABLE)
    cut = stretches((TokenRange(1, 6),), 2 * BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), (TokenRange(1, 6),), cut)
    assert packed(places, bytes_at(places, 1), request.starts, request.slot_bytes, Side.BOTH) == ()


def test_only_stretches_that_are_computed_are_planned():
    """The table of a prompt that is still computed is short."""
    whole = SlotPlan(rig("token-major", TABLE))
    for num_blocks in range(1, len(TABLE) + 1):
        request = rig("token-major", TABLE)
        short = StagedRequest(
            request.program,
            (TABLE[:num_blocks],),
            request.target_tables,
            request.ranges,
            request.strategy,
            request.slot_bytes,
            request.starts,
        )
        plan = SlotPlan(short, Side.BOTH, num_blocks * BLOCK_TOKENS)
        assert len(plan.stretches) == 12
        for number in range(num_blocks):
            for ours, theirs in zip(plan.slots(number), whole.slots(number), strict=True):
                assert_same_stages(ours.stages, theirs.stages)
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

    monkeypatch.setattr("kvferry.plan.slots.places_for", counted)
    if not may_be_many:
        monkeypatch.setattr("kvferry.plan.slots.MAX_ROWS_TOGETHER", 4)
    plan = SlotPlan(rig("token-major", TABLE))
    for number in range(len(plan.stretches)):
        for _ in range(2):
            assert len(plan.slots(number)) == 1
    assert calls == ([1, TOGETHER, TOGETHER, 12 - 1 - 2 * TOGETHER] if may_be_many else [1] * 12)


def test_bytes_are_counted_for_each_stretch():
    request = rig("token-major", TABLE, num_tokens=10)
    cut = stretches(request.ranges, BLOCK_TOKENS)
    places = places_for(request.program, (request.source_tables, request.target_tables), request.ranges, cut)
    counted = bytes_at(places, len(cut))
    found = [copies_for(request.program, (TABLE,), (TABLE,), request.ranges, each).num_bytes for each in cut]
    assert counted == found
    assert all(first <= second for second, first in pairwise(found))
