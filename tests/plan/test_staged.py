"""The stages of direct, scatter and pack, executed with plain slices on buffers of bytes."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import RegionStarts
from kvferry.plan.strategy.strategies import Side, Stages, Strategy, source_runs, staged

POISON = 0xEE
SOURCE, TARGET, SOURCE_STAGING, TARGET_STAGING = 1 << 40, 2 << 40, 3 << 40, 4 << 40
many = settings(max_examples=150)
ways = st.sampled_from(Strategy)


def column(*numbers):
    return np.array(numbers, np.uint64)


def copies_of(*rows):
    """Rows as (source, target, length), counted from the start of either buffer."""
    sources, targets, lengths = zip(*rows, strict=True)
    return Copies(
        column(*sources) + np.uint64(SOURCE), column(*targets) + np.uint64(TARGET), column(*lengths), len(rows)
    )


def rows_of(copies, source, target):
    """Rows as (source, target, length), counted from two addresses."""
    return [
        (int(a) - source, int(b) - target, int(length))
        for a, b, length in zip(copies.source, copies.target, copies.length, strict=True)
    ]


@dataclass
class World:
    """Rows between two ranks with disjoint regions that may touch, and the size of a slot of staging memory."""

    copies: Copies
    starts: RegionStarts
    slot_bytes: int

    def stages(self, strategy: Strategy) -> Stages:
        """As each side plans its own, with staging memory of each rank at an address of its own."""
        source, target = (staged(self.copies, strategy, self.slot_bytes, self.starts, side) for side in Side)
        wire = {
            Strategy.DIRECT: (0, 0),
            Strategy.SCATTER: (0, TARGET_STAGING),
            Strategy.PACK: (SOURCE_STAGING, TARGET_STAGING),
        }[strategy]
        return Stages(
            source.gather.shifted(0, SOURCE_STAGING),
            target.wire.shifted(*wire),
            target.scatter.shifted(TARGET_STAGING, 0),
        )


@st.composite
def sides(draw, lengths):
    """Where rows of these lengths lie on one side, in any order and often back to back, and which begin a region."""
    addresses, first_of_region, end = [0] * len(lengths), [], draw(st.integers(0, 3))
    for row in draw(st.permutations(range(len(lengths)))):
        addresses[row] = end
        if draw(st.integers(0, 5)) == 0:
            first_of_region.append(end)
        end += lengths[row] + draw(st.sampled_from([0, 0, 0, 1, 5]))
    return addresses, first_of_region


@st.composite
def worlds(draw):
    lengths = draw(st.lists(st.integers(1, 24), max_size=24))
    (sources, source_starts), (targets, target_starts) = draw(sides(lengths)), draw(sides(lengths))
    return World(
        Copies(
            column(*sources) + np.uint64(SOURCE),
            column(*targets) + np.uint64(TARGET),
            column(*lengths),
            len(lengths),
        ),
        RegionStarts(column(*source_starts) + np.uint64(SOURCE), column(*target_starts) + np.uint64(TARGET)),
        draw(st.integers(1, 40)),
    )


def executed(world, strategy):
    """The target after all stages, and how often each of its bytes was written."""
    size = 64 + int(max((world.copies.source - np.uint64(SOURCE) + world.copies.length).max(initial=0), 1024))
    source = (np.arange(size, dtype=np.uint32) * 2654435761 >> 7).astype(np.uint8)
    buffers = {SOURCE: source} | {
        base: np.full(size, POISON, np.uint8) for base in (TARGET, SOURCE_STAGING, TARGET_STAGING)
    }
    written = {base: np.zeros(size, np.uint8) for base in buffers}
    stages = world.stages(strategy)
    for stage in (stages.gather, stages.wire, stages.scatter):
        for start, stop, length in zip(*(c.tolist() for c in (stage.source, stage.target, stage.length)), strict=True):
            read, write = start >> 40 << 40, stop >> 40 << 40
            start, stop = start - read, stop - write
            buffers[write][stop : stop + length] = buffers[read][start : start + length]
            written[write][stop : stop + length] += 1
    return buffers[TARGET], written


@many
@given(worlds())
def test_i7_direct_scatter_and_pack_leave_identical_targets(world):
    expected = np.full_like(executed(world, Strategy.DIRECT)[0], POISON)
    size = len(expected)
    source = (np.arange(size, dtype=np.uint32) * 2654435761 >> 7).astype(np.uint8)
    for start, stop, length in rows_of(world.copies, SOURCE, TARGET):
        expected[stop : stop + length] = source[start : start + length]
    for strategy in Strategy:
        target, written = executed(world, strategy)
        assert np.array_equal(target, expected), strategy
        assert written[TARGET].sum() == world.copies.num_bytes
        assert all(times.max() <= 1 for times in written.values())
        assert not written[SOURCE].any()


@many
@given(worlds(), ways)
def test_i6_each_stage_moves_the_same_bytes_or_does_not_take_place(world, strategy):
    stages = world.stages(strategy)
    taking_place = {
        Strategy.DIRECT: (False, True, False),
        Strategy.SCATTER: (False, True, True),
        Strategy.PACK: (True, True, True),
    }[strategy]
    for stage, takes_place in zip((stages.gather, stages.wire, stages.scatter), taking_place, strict=True):
        assert stage.num_bytes == (world.copies.num_bytes if takes_place else 0)
        assert bool(len(stage)) == (takes_place and len(world.copies) > 0)


def bytes_at(address, length):
    return [start + i for start, size in zip(address.tolist(), length.tolist(), strict=True) for i in range(size)]


@many
@given(worlds(), ways)
def test_nothing_is_read_twice_and_nothing_that_is_not_wanted(world, strategy):
    stages = world.stages(strategy)
    first = stages.gather if strategy is Strategy.PACK else stages.wire
    assert sorted(bytes_at(first.source, first.length)) == sorted(bytes_at(world.copies.source, world.copies.length))


@many
@given(worlds(), st.sampled_from([Strategy.SCATTER, Strategy.PACK]))
def test_no_row_of_any_stage_crosses_a_slot_and_staging_addresses_ascend_without_gaps(world, strategy):
    stages, slot_bytes = world.stages(strategy), world.slot_bytes
    sides = [
        (stages.gather.target, stages.gather.length, SOURCE_STAGING),
        (stages.wire.target, stages.wire.length, TARGET_STAGING),
    ]
    sides.append((stages.scatter.source, stages.scatter.length, TARGET_STAGING))
    if strategy is Strategy.PACK:
        sides.append((stages.wire.source, stages.wire.length, SOURCE_STAGING))
    for address, length, base in sides:
        offset = address - np.uint64(base)
        assert np.array_equal(offset, np.cumsum(length) - length)
        assert np.all(offset // slot_bytes == (offset + length - np.uint64(1)) // slot_bytes)


@many
@given(worlds(), st.sampled_from([Strategy.SCATTER, Strategy.PACK]))
def test_rows_are_never_joined_across_regions(world, strategy):
    stages = world.stages(strategy)
    read = stages.gather if strategy is Strategy.PACK else stages.wire
    for starts, address, length in (
        (world.starts.source, read.source, read.length),
        (world.starts.target, stages.scatter.target, stages.scatter.length),
    ):
        for start, size in zip(address.tolist(), length.tolist(), strict=True):
            assert not any(start < border < start + size for border in starts.tolist())


@many
@given(worlds())
def test_a_packed_wire_has_one_row_per_slot(world):
    wire = world.stages(Strategy.PACK).wire
    assert len(wire) == -(-world.copies.num_bytes // world.slot_bytes)
    assert np.all(wire.length[:-1] == world.slot_bytes)


@many
@given(worlds())
def test_a_scattered_wire_has_one_row_per_source_run_and_slot_border_at_most(world):
    runs = source_runs(world.copies, world.starts.source)
    num_slots = -(-world.copies.num_bytes // world.slot_bytes)
    assert runs <= len(world.stages(Strategy.SCATTER).wire) <= runs + max(0, num_slots - 1)
    assert len(replace(world, slot_bytes=1 << 20).stages(Strategy.SCATTER).wire) == runs


ONE_REGION = RegionStarts(column(SOURCE), column(TARGET))
# Two heads of two tokens each: together at the source, apart at the target, and listed in no order.
HEADS = copies_of((16, 8, 8), (0, 0, 8), (24, 108, 8), (8, 100, 8))


def test_scatter_reads_one_run_and_writes_each_row():
    stages = World(HEADS, ONE_REGION, 64).stages(Strategy.SCATTER)
    assert rows_of(stages.wire, SOURCE, TARGET_STAGING) == [(0, 0, 32)]
    assert rows_of(stages.scatter, TARGET_STAGING, TARGET) == [(0, 0, 8), (8, 100, 8), (16, 8, 8), (24, 108, 8)]


def test_pack_gathers_in_the_order_of_the_target_and_writes_long_rows():
    stages = World(HEADS, ONE_REGION, 64).stages(Strategy.PACK)
    assert rows_of(stages.gather, SOURCE, SOURCE_STAGING) == [(0, 0, 8), (16, 8, 8), (8, 16, 8), (24, 24, 8)]
    assert rows_of(stages.wire, SOURCE_STAGING, TARGET_STAGING) == [(0, 0, 32)]
    assert rows_of(stages.scatter, TARGET_STAGING, TARGET) == [(0, 0, 16), (16, 100, 16)]


def test_rows_are_cut_where_a_slot_ends_and_only_there():
    stages = World(HEADS, ONE_REGION, 12).stages(Strategy.PACK)
    assert rows_of(stages.wire, SOURCE_STAGING, TARGET_STAGING) == [(0, 0, 12), (12, 12, 12), (24, 24, 8)]
    assert rows_of(stages.scatter, TARGET_STAGING, TARGET) == [(0, 0, 12), (12, 12, 4), (16, 100, 8), (24, 108, 8)]


def test_a_row_longer_than_several_slots_is_cut_at_each():
    stages = World(copies_of((5, 7, 10)), ONE_REGION, 4).stages(Strategy.SCATTER)
    assert rows_of(stages.wire, SOURCE, TARGET_STAGING) == [(5, 0, 4), (9, 4, 4), (13, 8, 2)]


def test_a_region_that_begins_where_another_ends_is_not_joined():
    borders = RegionStarts(column(SOURCE, SOURCE + 16), column(TARGET))
    stages = World(HEADS, borders, 64).stages(Strategy.SCATTER)
    assert rows_of(stages.wire, SOURCE, TARGET_STAGING) == [(0, 0, 16), (16, 16, 16)]
    assert source_runs(HEADS, borders.source) == 2
    assert source_runs(HEADS, ONE_REGION.source) == 1


@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
def test_a_border_on_one_side_divides_rows_on_that_side_alone(strategy):
    rows = copies_of((0, 40, 8), (8, 48, 8))
    at_source = World(rows, RegionStarts(column(SOURCE, SOURCE + 8), column(TARGET)), 64).stages(strategy)
    at_target = World(rows, RegionStarts(column(SOURCE), column(TARGET, TARGET + 48)), 64).stages(strategy)
    read = [stages.gather if strategy is Strategy.PACK else stages.wire for stages in (at_source, at_target)]
    assert [len(copies) for copies in read] == [2, 1]
    assert [len(stages.scatter) for stages in (at_source, at_target)] == [1, 2]


def test_regions_without_rows_or_beyond_them_change_nothing():
    starts = column(0, SOURCE, SOURCE + 32, SOURCE + 4096)
    assert source_runs(HEADS, starts) == 1


def test_direct_is_the_copies_themselves():
    assert staged(HEADS, Strategy.DIRECT, 64, ONE_REGION, Side.TARGET).wire is HEADS


def test_sources_that_several_rows_share_are_still_brought_to_each():
    world = World(copies_of((0, 0, 8), (4, 50, 8), (0, 100, 8)), ONE_REGION, 16)
    targets = [executed(world, strategy)[0] for strategy in Strategy]
    assert all(np.array_equal(targets[0], target) for target in targets[1:])


def test_pieces_tell_the_rows_before_any_merging():
    copies = Copies(HEADS.source, HEADS.target, HEADS.length, 99)
    stages = World(copies, ONE_REGION, 64).stages(Strategy.PACK)
    assert (stages.gather.pieces, stages.wire.pieces, stages.scatter.pieces) == (99, 1, 99)
