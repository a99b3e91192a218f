"""Bundles of states: together they are the program, and each needs no state that is computed later."""

import pytest
from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stretch import moved

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.program_split import bundles
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route


@settings(max_examples=60)
@given(st.one_of(scenarios(), handmade()), st.integers(1, 5))
def test_the_bundles_of_a_program_move_each_byte_of_it_once(scenario, num_bundles):
    found = route(scenario.sources, scenario.targets)
    for source, target in found.pairs():
        legs, sides = found.between(source, target), (scenario.sources[source], scenario.targets[target])
        tables = scenario.source_tables[source], scenario.target_tables[target]
        cut = bundles(legs, *sides, num_bundles)
        copies = [copies_for(bundle.program, *tables, scenario.ranges) for bundle in cut]
        assert moved(*copies) == moved(copies_for(bind(legs, *sides), *tables, scenario.ranges))
        assert 1 <= len(cut) <= num_bundles


@pytest.mark.parametrize(("num_bundles", "ends"), [(1, [6]), (2, [3, 6]), (4, [2, 4, 6]), (6, [1, 2, 3, 4, 5, 6])])
def test_a_bundle_is_there_when_its_last_state_is(num_bundles, ends):
    source, target = (
        describe(attention(3, 2, 8, "float32", 4), EngineShape(1, 1, size, 8, "token-major"), 1 << 20)[0]
        for size in (4, 8)
    )
    cut = bundles(route([source], [target]).between(0, 0), source, target, num_bundles)
    assert [bundle.num_states for bundle in cut] == ends


@pytest.mark.parametrize(
    ("memory_format", "num_layers", "num_bundles", "ends"),
    [
        # Keys and values of a block lie side by side: a bundle has those of whole layers.
        ("packed", 4, 8, [2, 4, 6, 8]),
        ("packed", 28, 8, [8, 16, 24, 32, 40, 48, 56]),
        ("token-major", 28, 8, [7, 14, 21, 28, 35, 42, 49, 56]),
        # So do all layers: whatever is cut is more rows, and as few as there may be are made.
        ("block-major", 28, 8, [10, 20, 30, 40, 50, 56]),
    ],
)
def test_states_that_lie_side_by_side_stay_together(memory_format, num_layers, num_bundles, ends):
    source, target = (
        describe(attention(num_layers, 2, 8, "float32", 4), EngineShape(1, 1, 8, 8, memory_format), at)[0]
        for at in (1 << 20, 1 << 40)
    )
    cut = bundles(route([source], [target]).between(0, 0), source, target, num_bundles)
    assert [bundle.num_states for bundle in cut] == ends
