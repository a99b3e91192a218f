"""The invariants I1-I6 of docs/design.md over random pairs of engines, checked by the oracle."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.copies import Copies
from kvferry.plan.layout import TokenRange
from kvferry.plan.program import bind
from kvferry.plan.request import copies_for
from kvferry.plan.route import route
from kvferry.testing import oracle
from kvferry.testing.strategies import Scenario, handmade, scenarios

many = settings(max_examples=150, deadline=None)


def pair_copies(scenario: Scenario, source_rank: int, target_rank: int) -> Copies:
    source, target = scenario.sources[source_rank], scenario.targets[target_rank]
    legs = route(scenario.sources, scenario.targets).between(source_rank, target_rank)
    tables = scenario.source_tables[source_rank], scenario.target_tables[target_rank]
    return copies_for(bind(legs, source, target), *tables, scenario.tokens)


def filled(scenario: Scenario) -> list[oracle.Memory]:
    memories = [oracle.Memory.poisoned(layout) for layout in scenario.sources]
    for memory, tables in zip(memories, scenario.source_tables, strict=True):
        oracle.fill(memory, tables, TokenRange(0, scenario.tokens.last))
    return memories


@many
@given(st.one_of(scenarios(), handmade()))
def test_i1_i2_i3_each_requested_element_arrives_once_and_nothing_else_is_touched(scenario):
    sources = filled(scenario)
    found = route(scenario.sources, scenario.targets)
    for rank, layout in enumerate(scenario.targets):
        target = oracle.Memory.poisoned(layout)
        written = {start: np.zeros(len(buffer), np.uint8) for start, buffer in target.buffers.items()}
        for source_rank in found.sources_of(rank):
            oracle.execute(pair_copies(scenario, source_rank, rank), sources[source_rank], target, written)
        oracle.expect(target, scenario.target_tables[rank], scenario.tokens, written, scenario.windows)


@many
@given(scenarios())
def test_i4_route_is_deterministic_and_depends_on_shapes_only(scenario):
    moved = [
        replace(layout, regions=tuple(replace(r, address=r.address + (7 << 50)) for r in layout.regions))
        for layout in scenario.sources
    ]
    assert route(scenario.sources, scenario.targets) == route(moved, scenario.targets)


@many
@given(st.one_of(scenarios(), handmade()))
def test_i4_replicas_share_the_load_to_within_one_box(scenario):
    holders = defaultdict(list)
    for rank, layout in enumerate(scenario.sources):
        for placement in layout.placements:
            holders[placement.state].append((rank, placement.spans))
    load: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for leg in route(scenario.sources, scenario.targets).legs:
        replicas = tuple(
            rank
            for rank, spans in holders[leg.state]
            if all(s.start <= b.start and b.stop <= s.stop for s, b in zip(spans, leg.box, strict=True))
        )
        load[replicas][leg.source_rank] += 1
    for replicas, counts in load.items():
        shares = [counts[rank] for rank in replicas]
        assert max(shares) - min(shares) <= 1


@many
@given(scenarios())
def test_i5_exchanging_the_roles_gives_the_transposed_plan(scenario):
    """Compared where both directions choose the same pairs: without replicas on either side."""
    swapped = Scenario(
        scenario.targets, scenario.sources, scenario.target_tables, scenario.source_tables, scenario.tokens, {}
    )
    there, back = route(scenario.sources, scenario.targets), route(swapped.sources, swapped.targets)
    transposed = {(leg.target_rank, leg.source_rank, leg.state, leg.box) for leg in back.legs}
    if any(len(_holders(side, leg)) > 1 for leg in there.legs for side in (scenario.sources, scenario.targets)):
        return
    assert {(leg.source_rank, leg.target_rank, leg.state, leg.box) for leg in there.legs} == transposed
    for source_rank, target_rank in there.pairs():
        forward = pair_copies(scenario, source_rank, target_rank)
        backward = pair_copies(swapped, target_rank, source_rank)
        assert byte_pairs(forward) == {(target, source) for source, target in byte_pairs(backward)}


@many
@given(scenarios())
def test_i6_merging_changes_the_number_of_rows_never_the_bytes(scenario):
    for source_rank, target_rank in route(scenario.sources, scenario.targets).pairs():
        whole = pair_copies(scenario, source_rank, target_rank)
        assert len(whole) <= whole.pieces
        single_tokens = [
            pair_copies(replace(scenario, tokens=TokenRange(token, token + 1)), source_rank, target_rank)
            for token in range(scenario.tokens.first, scenario.tokens.last)
        ]
        assert byte_pairs(whole) == set().union(*(byte_pairs(part) for part in single_tokens))
        assert whole.num_bytes == sum(part.num_bytes for part in single_tokens)


def _holders(layouts, leg):
    return [
        rank
        for rank, layout in enumerate(layouts)
        if leg.state in layout.placement_of()
        and all(
            s.start <= b.start and b.stop <= s.stop
            for s, b in zip(layout.placement_of()[leg.state].spans, leg.box, strict=True)
        )
    ]


def byte_pairs(copies: Copies) -> set[tuple[int, int]]:
    rows = zip(copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True)
    return {(source + i, target + i) for source, target, length in rows for i in range(length)}
