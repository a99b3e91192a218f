"""Stretches of a request: together they are the whole, and a group's window is that of the whole."""

from itertools import pairwise

import numpy as np
import pytest
from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for, volume
from kvferry.plan.programs.stretches import (
    WHOLE,
    Stretch,
    even_stretches,
    parted,
    stretch_tokens,
    stretches,
    unit_tokens,
)
from kvferry.plan.routing.route import route

many = settings(max_examples=60)
engines = st.one_of(scenarios(), handmade())


def moved(*copies):
    """Every byte that moves: where to and where from, in the order of the targets."""
    length = np.concatenate([rows.length for rows in copies]).astype(np.int64)
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    columns = [np.concatenate([getattr(rows, side) for rows in copies]) for side in ("target", "source")]
    target, source = (np.repeat(column, length) + within.astype(np.uint64) for column in columns)
    order = np.argsort(target)
    return [target[order].tolist(), source[order].tolist()]


def programs_of(scenario):
    """The program of each pair of ranks, and the block tables of both."""
    found = route(scenario.sources, scenario.targets)
    for source, target in found.pairs():
        program = bind(found.between(source, target), scenario.sources[source], scenario.targets[target])
        yield program, (scenario.source_tables[source], scenario.target_tables[target])


@many
@given(engines, st.integers(0, 4096))
def test_the_stretches_of_a_request_move_each_byte_of_it_once(scenario, most_bytes):
    for program, tables in programs_of(scenario):
        parts = stretches(scenario.ranges, stretch_tokens(program, most_bytes))
        whole = copies_for(program, *tables, scenario.ranges)
        copies = [copies_for(program, *tables, scenario.ranges, part) for part in parts]
        assert moved(*copies) == moved(whole)
        volumes = [volume(program, scenario.ranges, part) for part in parts]
        assert tuple(map(sum, zip(*volumes, strict=True))) == volume(program, scenario.ranges)
        assert sum(num_bytes for _, num_bytes in volumes) == whole.num_bytes


@many
@given(engines, st.integers(0, 40))
def test_the_two_parts_of_a_request_move_each_byte_of_it_once(scenario, token):
    for program, tables in programs_of(scenario):
        copies = [copies_for(program, *tables, scenario.ranges, part) for part in parted(token)]
        assert moved(*copies) == moved(copies_for(program, *tables, scenario.ranges))


MODEL = attention(2, 2, 8, "float32", 4)


def program_of(tokens_per_block=(4, 6)):
    source, target = (
        describe(MODEL, EngineShape(1, 1, size, 64, "token-major"), 1 << 20)[0] for size in tokens_per_block
    )
    return bind(route([source], [target]).between(0, 0), source, target)


def test_a_stretch_holds_as_many_whole_units_as_fit_and_one_at_least():
    program, per_token = program_of(), MODEL.bytes_per_token
    assert [stretch_tokens(program, size * per_token) for size in (0, 1, 2, 3, 4, 100)] == [2, 2, 2, 2, 4, 100]


@pytest.mark.parametrize("run_tokens", [1, 2, 4, 8])
def test_units_of_ranks_that_share_tokens_are_made_of_the_tokens_of_one(run_tokens):
    """Of eight tokens each of two ranks has four, which are one block; of sixteen eight, in two."""
    shape = EngineShape(1, 1, 4, 64, "token-major", context_parallel=2, run_tokens=run_tokens)
    engine = describe(MODEL, shape, 1 << 20)
    program, per_token = bind(route(engine, engine).between(1, 1), engine[1], engine[1]), MODEL.bytes_per_token
    period = max(8, 2 * run_tokens)
    assert unit_tokens(program) == period
    of_period = period // 2 * per_token
    sizes = (0, of_period - 1, of_period, 2 * of_period - 1, 2 * of_period)
    assert [stretch_tokens(program, size) // period for size in sizes] == [1, 1, 1, 1, 2]


def test_stretches_are_cut_at_multiples_whatever_is_wanted_first():
    cuts = [(part.tokens.first, part.tokens.last, part.is_last) for part in stretches([TokenRange(5, 17)], 4)]
    assert cuts == [(4, 8, False), (8, 12, False), (12, 16, False), (16, 20, True)]


@pytest.mark.parametrize("ranges", [[], [TokenRange(0, 0)], [TokenRange(8, 8)], [TokenRange(9, 9), TokenRange(8, 8)]])
def test_a_request_without_tokens_is_one_stretch(ranges):
    (only,) = stretches(ranges, 4)
    assert only.is_last


def test_the_whole_is_a_stretch():
    assert Stretch(TokenRange(0, 1 << 48), is_last=True) == WHOLE
    assert parted(0) == (Stretch(TokenRange(0, 0), is_last=False), WHOLE)


@pytest.mark.parametrize(
    ("first", "last", "most", "cuts"),
    [
        (0, 100, 40, [0, 36, 72]),
        (10, 100, 40, [8, 40, 72]),
        (0, 40, 40, [0]),
        (0, 41, 40, [0, 24]),
        (0, 3, 40, [0]),
        (0, 0, 40, [0]),
        (7, 7, 40, [4]),
        (0, 9, 4, [0, 4, 8]),
    ],
)
def test_stretches_of_one_length(first: int, last: int, most: int, cuts: list[int]) -> None:
    found = even_stretches([TokenRange(first, last)], most, 4)
    assert [each.tokens.first for each in found] == cuts
    assert [each.is_last for each in found] == [False] * (len(cuts) - 1) + [True]


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 20), st.integers(1, 8))
def test_even_stretches_cover_everything_and_are_no_more_than_there_must_be(
    first: int, more: int, units: int, unit: int
) -> None:
    most = units * unit
    found = [each.tokens for each in even_stretches([TokenRange(first, first + more)], most, unit)]
    assert all(each.last == after.first for each, after in pairwise(found))
    assert all(each.first % unit == 0 and unit <= len(each) <= most for each in found)
    assert found[0].first <= first
    assert found[-1].last >= first + more
    assert len(found) <= max(1, -(-(first % unit + more) // most))
