"""The invariants I1-I6 of docs/design/plan.md over random pairs of engines, checked by the oracle."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from engines import oracle
from engines.strategies import Scenario, handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.testing.elements import complete_entries

pytestmark = pytest.mark.uncounted
many = settings(max_examples=200)
engines = st.one_of(scenarios(), handmade())


def pair_copies(scenario: Scenario, source_rank: int, target_rank: int) -> Copies:
    source, target = scenario.sources[source_rank], scenario.targets[target_rank]
    legs = route(scenario.sources, scenario.targets).between(source_rank, target_rank)
    tables = scenario.source_tables[source_rank], scenario.target_tables[target_rank]
    return copies_for(bind(legs, source, target), *tables, scenario.ranges)


def filled(scenario: Scenario) -> list[oracle.Memory]:
    memories = [oracle.Memory.poisoned(layout) for layout in scenario.sources]
    for memory, tables in zip(memories, scenario.source_tables, strict=True):
        oracle.fill(memory, tables, TokenRange(0, scenario.last))
    return memories


@many
@given(engines)
def test_i1_i2_i3_each_requested_element_arrives_once_and_nothing_else_is_touched(scenario):
    sources = filled(scenario)
    found = route(scenario.sources, scenario.targets)
    for rank, layout in enumerate(scenario.targets):
        target = oracle.Memory.poisoned(layout)
        written = {start: np.zeros(len(buffer), np.uint8) for start, buffer in target.buffers.items()}
        for source_rank in found.sources_of(rank):
            oracle.execute(pair_copies(scenario, source_rank, rank), sources[source_rank], target, written)
        oracle.expect(target, scenario.target_tables[rank], scenario.ranges, written)


@many
@given(scenarios())
def test_i4_route_is_deterministic_and_depends_on_shapes_only(scenario):
    moved = [
        replace(layout, regions=tuple(replace(r, address=r.address + (7 << 50)) for r in layout.regions))
        for layout in scenario.sources
    ]
    assert route(scenario.sources, scenario.targets) == route(moved, scenario.targets)


@many
@given(engines)
def test_i4_replicas_share_the_load_to_within_one_box(scenario):
    load: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for leg in route(scenario.sources, scenario.targets).legs:
        load[holders(scenario.sources, leg)][leg.source_rank] += 1
    for replicas, counts in load.items():
        shares = [counts[rank] for rank in replicas]
        assert max(shares) - min(shares) <= 1


@many
@given(engines)
def test_every_source_rank_hears_that_the_request_is_done(scenario):
    """Also those that nobody reads: else they would keep its blocks until their lease ends."""
    found = route(scenario.sources, scenario.targets)
    for rank in range(len(scenario.sources)):
        assert found.targets_of(rank)
        assert all(rank in found.sources_of(target) for target in found.targets_of(rank))
    assert set(found.pairs()) <= {(s, t) for t in range(len(scenario.targets)) for s in found.sources_of(t)}


@many
@given(scenarios())
def test_i5_exchanging_the_roles_gives_the_transposed_plan(scenario):
    """Compared where both directions choose the same pairs: without replicas on either side."""
    there, back = route(scenario.sources, scenario.targets), route(scenario.targets, scenario.sources)
    if any(len(holders(side, leg)) > 1 for leg in there.legs for side in (scenario.sources, scenario.targets)):
        return
    turned = {(leg.target_rank, leg.source_rank, leg.state, leg.box, leg.tokens) for leg in back.legs}
    assert {(leg.source_rank, leg.target_rank, leg.state, leg.box, leg.tokens) for leg in there.legs} == turned
    if len(set(scenario.ranges)) > 1 or any(group.tail_is_free for group in scenario.targets[0].groups):
        return
    ranges = (scenario.ranges[:1] or (TokenRange(0, 0),)) * len(scenario.sources[0].groups)
    swapped = Scenario(
        "swapped", scenario.targets, scenario.sources, scenario.target_tables, scenario.source_tables, ranges
    )
    for source_rank, target_rank in there.pairs():
        forward = pair_copies(scenario, source_rank, target_rank)
        backward = pair_copies(swapped, target_rank, source_rank)
        assert byte_pairs(forward) == {(target, source) for source, target in byte_pairs(backward)}


@many
@given(engines)
def test_i6_merging_changes_the_number_of_rows_never_the_bytes(scenario):
    """A request in one piece moves the same bytes as element by element, which nothing merges."""
    found = route(scenario.sources, scenario.targets)
    for source_rank, target_rank in found.pairs():
        whole = pair_copies(scenario, source_rank, target_rank)
        expected = set()
        for leg in found.between(source_rank, target_rank):
            expected |= set(element_pairs(scenario, leg))
        assert len(whole) <= whole.pieces
        assert whole.num_bytes == len(byte_pairs(whole))
        if any(group.tail_is_free for group in scenario.targets[target_rank].groups):
            assert byte_pairs(whole) >= expected
        else:
            assert byte_pairs(whole) == expected


def element_pairs(scenario, leg):
    """(source address, target address) of every byte of a leg, found by the oracle's own addresses."""
    sides = []
    for layouts, tables, rank in (
        (scenario.sources, scenario.source_tables, leg.source_rank),
        (scenario.targets, scenario.target_tables, leg.target_rank),
    ):
        placement = layouts[rank].placement_of()[leg.state]
        entries = complete_entries(layouts[rank].state_named()[leg.state], TokenRange(0, scenario.last))
        elements = oracle.element_addresses(layouts[rank], placement, tables[rank], entries)
        sides.append({(token, coordinate): address for token, coordinate, address in elements})
    layout = scenario.targets[leg.target_rank]
    state = layout.state_named()[leg.state]
    tokens = complete_entries(state, scenario.ranges[layout.placement_of()[leg.state].group])
    for token, coordinate in sides[0].keys() & sides[1].keys():
        inside = all(span.start <= c < span.stop for span, c in zip(leg.box, coordinate, strict=True))
        moves = not state.per_token or (tokens.first <= token and oracle.is_seen(state, token, tokens.last))
        if inside and moves:
            pair = sides[0][token, coordinate], sides[1][token, coordinate]
            yield from ((pair[0] + byte, pair[1] + byte) for byte in range(state.item_bytes))


def holders(layouts, leg):
    """The ranks that hold all of a leg: its box, and its tokens."""
    found = []
    for rank, layout in enumerate(layouts):
        placement = layout.placement_of().get(leg.state)
        if placement is None or not contains(placement.spans, leg.box):
            continue
        share = layout.groups[placement.group].share.tokens()
        per_token = layout.state_named()[leg.state].per_token
        if not per_token or all(number_in(share, t) for t in range(200) if number_in(leg.tokens, t)):
            found.append(rank)
    return tuple(found)


def contains(outer, inner):
    return all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, inner, strict=True))


def number_in(tokens, token):
    return any(span.start <= token % tokens.period < span.stop for span in tokens.spans)


def byte_pairs(copies: Copies) -> set[tuple[int, int]]:
    rows = zip(copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True)
    return {(source + i, target + i) for source, target, length in rows for i in range(length)}
