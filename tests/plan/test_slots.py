"""I7 slot by slot: what goes through staging memory, in slots that are used again, leaves what direct copies leave."""

from dataclasses import replace

import numpy as np
import pytest
from engines import oracle
from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import RequestError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import CacheModel, LayerCache, attention, latent
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import stretch_tokens, stretches
from kvferry.plan.programs.tiles import rows_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots import slot_plan
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest, any_tables
from kvferry.plan.strategy.strategies import Side, Strategy

engines = st.one_of(scenarios(), handmade())
STAGED = st.sampled_from([Strategy.SCATTER, Strategy.PACK])


def carry(copies, read, write):
    for source, target, length in zip(copies.source, copies.target, copies.length, strict=True):
        write(int(target), int(length))[:] = read(int(source), int(length))


@settings(max_examples=100)
@given(engines, STAGED, st.integers(1, 3000))
def test_i7_slot_by_slot_the_target_is_the_same(scenario, strategy, slot_bytes):
    found = route(scenario.sources, scenario.targets)
    sources = [oracle.Memory.poisoned(layout) for layout in scenario.sources]
    for memory, tables in zip(sources, scenario.source_tables, strict=True):
        oracle.fill(memory, tables, TokenRange(0, scenario.last))
    for rank, layout in enumerate(scenario.targets):
        straight, through = oracle.Memory.poisoned(layout), oracle.Memory.poisoned(layout)
        for source_rank in found.sources_of(rank):
            source = scenario.sources[source_rank]
            program = bind(found.between(source_rank, rank), source, layout)
            tables = scenario.source_tables[source_rank], scenario.target_tables[rank]
            carry(copies_for(program, *tables, scenario.ranges), sources[source_rank].at, straight.at)
            request = StagedRequest(program, *tables, scenario.ranges, strategy, slot_bytes)
            _through_slots(request, sources[source_rank], through)
        for address, buffer in straight.buffers.items():
            assert np.array_equal(buffer, through.buffers[address])


def shared(context, decode_context, run_tokens, block_tokens, address):
    """A rank of each share of the tokens, whose last blocks may be filled beyond the request."""
    shape = EngineShape(
        decode_context,
        1,
        block_tokens,
        12,
        "token-major",
        run_tokens=run_tokens,
        context_parallel=context,
        decode_context_parallel=decode_context,
    )
    free = [
        replace(layout, groups=tuple(replace(group, tail_is_free=True) for group in layout.groups))
        for layout in describe(latent(1, 4, "float32", 4), shape, address)
    ]
    return tuple(free)


@settings(max_examples=200)
@given(
    st.sampled_from([(2, 1), (1, 2), (3, 1)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(4, 4), (4, 8), (8, 4)]),
    st.integers(0, 12),
    st.integers(0, 30),
    st.integers(16, 200),
)
def test_i7_where_the_last_stretch_has_only_tokens_of_other_ranks(share, run_tokens, blocks, first, num_tokens, most):
    """The unit that the rank's last token belongs to is completed all the same, as it is when nothing is cut."""
    source, target = (shared(*share, run_tokens, each, 1 << at) for each, at in zip(blocks, (41, 52), strict=True))
    tables, ranges = (tuple(range(12)),), (TokenRange(first, first + num_tokens),)
    for rank in range(len(target)):
        program = bind(route(source, target).between(rank, rank), source[rank], target[rank])
        memory = oracle.Memory.poisoned(source[rank])
        oracle.fill(memory, tables, TokenRange(0, first + num_tokens))
        straight, cut, through = (oracle.Memory.poisoned(target[rank]) for _ in range(3))
        carry(copies_for(program, tables, tables, ranges), memory.at, straight.at)
        for stretch in stretches(ranges, stretch_tokens(program, most)):
            carry(copies_for(program, tables, tables, ranges, stretch), memory.at, cut.at)
        _through_slots(StagedRequest(program, tables, tables, ranges, Strategy.PACK, most), memory, through)
        for address, buffer in straight.buffers.items():
            assert np.array_equal(buffer, cut.buffers[address])
            assert np.array_equal(buffer, through.buffers[address])


def free_tails(model, address, **shares):
    """Ranks whose last blocks may be filled beyond the request."""
    return tuple(
        replace(layout, groups=tuple(replace(group, tail_is_free=True) for group in layout.groups))
        for layout in describe(model, EngineShape(1, 1, 4, 12, "token-major", **shares), address)
    )


def test_where_nothing_is_wanted_no_tail_is_completed():
    model = attention(1, 2, 4, "float32", 4)
    (source,), (target,) = free_tails(model, 1 << 20), free_tails(model, 1 << 30)
    program = bind(route((source,), (target,)).between(0, 0), source, target)
    tables = (tuple(range(5)),)
    assert not len(copies_for(program, tables, tables, (TokenRange(7, 7),)))
    assert copies_for(program, tables, tables, (TokenRange(6, 7),)).num_bytes == 2 * model.bytes_per_token


def test_a_tail_is_completed_once_though_another_group_goes_on():
    """The stretches after the end of the shorter range are nothing to it, also where tokens take turns among ranks."""
    kept = attention(1, 2, 4, "float32", 4).layers[0].kept
    other = tuple(replace(each, state=replace(each.state, name=f"{each.state.name}.other")) for each in kept)
    model = CacheModel(2, (LayerCache(0, "short", kept), LayerCache(1, "long", other)))
    source, target = (free_tails(model, 1 << at, context_parallel=2, run_tokens=1) for at in (20, 30))
    tables, ranges = (tuple(range(5)), tuple(range(5, 10))), (TokenRange(0, 7), TokenRange(0, 18))
    for rank, num_tokens in ((0, 4 + 12), (1, 4 + 12)):
        program = bind(route(source, target).between(rank, rank), source[rank], target[rank])
        request = StagedRequest(program, tables, tables, ranges, Strategy.PACK, 2 * model.bytes_per_token)
        plan = SlotPlan(request, Side.TARGET)
        num_bytes = [slot.num_bytes for slot in slots_of(plan)]
        assert sum(num_bytes) == plan.num_bytes == num_tokens * model.bytes_per_token // 2
        assert len(num_bytes) > 2


def test_slots_have_one_length():
    """Five units of which four fit into a slot: three and two of them, not four and one."""
    model = attention(1, 2, 4, "float32", 4)
    (source,), (target,) = (describe(model, EngineShape(1, 1, 4, 8, "token-major"), 1 << at) for at in (20, 30))
    program = bind(route((source,), (target,)).between(0, 0), source, target)
    table, unit_bytes = (tuple(range(5)),), 4 * model.bytes_per_token
    request = StagedRequest(program, table, table, (TokenRange(0, 20),), Strategy.PACK, 4 * unit_bytes)
    assert [slot.num_bytes for slot in slots_of(SlotPlan(request, Side.TARGET))] == [3 * unit_bytes, 2 * unit_bytes]


def test_more_slots_than_anybody_needs_are_refused(monkeypatch):
    monkeypatch.setattr(slot_plan, "MAX_SLOTS", 8)
    model = attention(1, 2, 4, "float32", 4)
    (source,), (target,) = (describe(model, EngineShape(1, 1, 4, 8, "token-major"), 1 << at) for at in (20, 30))
    program = bind(route((source,), (target,)).between(0, 0), source, target)
    table, unit_bytes = (tuple(range(2)),), 4 * model.bytes_per_token
    for slot_bytes, is_enough in ((unit_bytes // 8, True), (unit_bytes // 8 - 1, False)):
        request = StagedRequest(program, table, table, (TokenRange(0, 8),), Strategy.PACK, slot_bytes)
        plan = SlotPlan(request, Side.TARGET)
        if is_enough:
            assert len(plan.slots(0)) == 8
            continue
        with pytest.raises(RequestError, match="at most 8 slots"):
            plan.slots(0)


def slots_of(plan):
    return [slot for number in range(len(plan.stretches)) for slot in plan.slots(number)]


def _through_slots(request, source, target):
    """Planned by each side for itself, with one slot on either side for everything: each is used again at once."""
    plans = [SlotPlan(request, side) for side in Side]
    num_bytes = 0
    for at_source, at_target in zip(*map(slots_of, plans), strict=True):
        num_bytes += at_target.num_bytes
        ours, theirs = (np.full(at_target.num_bytes, each, np.uint8) for each in (1, 2))

        def packed(at, length, buffer=ours):
            return buffer[at : at + length]

        def landed(at, length, buffer=theirs):
            return buffer[at : at + length]

        gather, wire, scatter = rows_of(at_source.gather), at_target.wire, rows_of(at_target.scatter)
        assert at_source.num_bytes == at_target.num_bytes <= request.slot_bytes
        assert len(wire) == 1 or not len(gather)
        assert scatter.num_bytes == wire.num_bytes == at_target.num_bytes > 0
        assert gather.num_bytes in (0, at_target.num_bytes)
        carry(gather, source.at, packed)
        carry(wire, packed if len(gather) else source.at, landed)
        carry(scatter, landed, target.at)
    assert num_bytes == plans[0].num_bytes == plans[1].num_bytes


@settings(max_examples=60, deadline=None)
@given(engines, st.integers(1, 3000))
def test_a_target_finds_the_packed_slots_without_the_tables_of_the_source(scenario, slot_bytes):
    found = route(scenario.sources, scenario.targets)
    for source_rank, rank in found.pairs():
        source, target = scenario.sources[source_rank], scenario.targets[rank]
        known = scenario.target_tables[rank], scenario.ranges, Strategy.PACK, slot_bytes
        program = bind(found.between(source_rank, rank), source, target)
        requests = [
            StagedRequest(program, tables, *known)
            for tables in (scenario.source_tables[source_rank], any_tables(source, scenario.last))
        ]
        for real, found_here in zip(*(slots_of(SlotPlan(each, Side.TARGET)) for each in requests), strict=True):
            assert real.num_bytes == found_here.num_bytes
            for column in ("source", "target", "length"):
                ours, theirs = (getattr(rows_of(slot.scatter), column) for slot in (real, found_here))
                assert np.array_equal(ours, theirs)
