"""Memory may lie anywhere in 64 bits: Intel's GPUs have addresses with the highest of them."""

from dataclasses import replace

from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for, places_for
from kvferry.plan.programs.stretches import stretches, unit_tokens
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots.packed_slots import packed
from kvferry.plan.strategy.strategies import Side, Strategy, staged

FAR = 1 << 63


def moved(layout: Layout) -> Layout:
    """The same memory, far away."""
    regions = tuple(replace(region, address=region.address + FAR) for region in layout.regions)
    return replace(layout, regions=regions)


@settings(max_examples=100, deadline=None)
@given(st.one_of(scenarios(), handmade()), st.booleans(), st.booleans())
def test_what_is_planned_for_far_memory_is_what_is_planned_for_near_memory(scenario, source_far, target_far):
    found = route(scenario.sources, scenario.targets)
    skip = FAR * source_far, FAR * target_far
    for source_rank, rank in found.pairs():
        source, target = scenario.sources[source_rank], scenario.targets[rank]
        near = bind(found.between(source_rank, rank), source, target)
        far = bind(
            found.between(source_rank, rank),
            moved(source) if source_far else source,
            moved(target) if target_far else target,
        )
        tables = scenario.source_tables[source_rank], scenario.target_tables[rank]
        cut = stretches(scenario.ranges, unit_tokens(near))
        for stretch in cut:
            rows, there = (copies_for(each, *tables, scenario.ranges, stretch) for each in (near, far))
            assert_moved(rows, there, *skip)
            if len(rows):
                sides = (
                    staged(each, Strategy.PACK, rows.num_bytes, starts, Side.SOURCE)
                    for each, starts in ((rows, near.starts), (there, far.starts))
                )
                assert_moved(*(each.gather for each in sides), skip[0], 0)
        slots = (
            packed(places_for(each, tables, scenario.ranges, cut), len(cut), each.starts, Side.SOURCE)
            for each in (near, far)
        )
        for tile, far_tile in zip(*slots, strict=True):
            assert_moved(rows_of(tile), rows_of(far_tile), skip[0], 0)


def assert_moved(near, far, source, target):
    assert far.source.tolist() == [at + source for at in near.source.tolist()]
    assert far.target.tolist() == [at + target for at in near.target.tolist()]
    assert far.length.tolist() == near.length.tolist()
