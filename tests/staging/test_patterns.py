"""Rows of real plans are few tiles: exactly the same rows, with far less to say about them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engines.strategies import handmade, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.describe import FORMATS, EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import NOTHING, Copies
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.tiles import Tile, rows_of, tile_of
from kvferry.plan.routing.route import route
from kvferry.plan.slots.slot_plan import SlotPlan, StagedRequest
from kvferry.plan.strategy.strategies import Side, Strategy
from kvferry.staging.device import patterns
from kvferry.staging.device.launches import MAX_ROW_BYTES
from kvferry.staging.device.patterns import for_device, tiles_of

STAGED = st.sampled_from([Strategy.SCATTER, Strategy.PACK])
MIB = 1 << 20
# What has a pattern, and what is left.
MOST_TILES = 2


def numbers(tiles: list[Tile] | tuple[Tile, ...]) -> int:
    """How many have to travel to the device."""
    return sum(len(tile.columns()) for tile in tiles)


def listed(tiles: list[Tile] | tuple[Tile, ...]) -> np.ndarray:
    """The rows of all tiles in the order of their numbers, three columns."""
    rows = rows_of(tiles)
    columns = np.array([rows.source, rows.target, rows.length])
    return columns[:, np.lexsort(columns)]


def check(copies: Copies) -> tuple[Tile, ...]:
    """The tiles of some rows, which they must have exactly."""
    tiles = tiles_of(copies)
    plain = tile_of(copies).split(MAX_ROW_BYTES)
    assert all(tiles)
    if not len(plain):
        assert tiles == ()
        return tiles
    assert np.array_equal(listed(tiles), listed([plain]))
    assert numbers(tiles) <= numbers([plain])
    return tiles


def moved(request: StagedRequest) -> list[tuple[Tile, ...]]:
    """All that one request gathers and scatters, slot by slot."""
    plans = [SlotPlan(request, side) for side in Side]
    slots = [[slot for number in range(len(plan.stretches)) for slot in plan.slots(number)] for plan in plans]
    return [tiles for ours, theirs in zip(*slots, strict=True) for tiles in (ours.gather, theirs.scatter) if tiles]


def check_slot(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """What a device is told of one side of a slot, which must be exactly that."""
    found = for_device(tiles)
    assert all(found)
    assert all(int(tile.length.max()) <= MAX_ROW_BYTES for tile in found)
    assert np.array_equal(listed(found), listed([tile_of(rows_of(tiles)).split(MAX_ROW_BYTES)]))
    return found


@pytest.fixture(autouse=True)
def short_rows_too(monkeypatch):
    """What is drawn has a few rows."""
    monkeypatch.setattr(patterns, "MIN_ROWS", 4)


@settings(max_examples=60)
@given(st.one_of(scenarios(), handmade()), STAGED, st.integers(64, 3000))
def test_tiles_have_the_rows_of_any_plan(scenario, strategy, slot_bytes):
    found = route(scenario.sources, scenario.targets)
    for rank, layout in enumerate(scenario.targets):
        for source_rank in found.sources_of(rank):
            source = scenario.sources[source_rank]
            program = bind(found.between(source_rank, rank), source, layout)
            tables = scenario.source_tables[source_rank], scenario.target_tables[rank]
            check(copies_for(program, *tables, scenario.ranges))
            for tiles in moved(StagedRequest(program, *tables, scenario.ranges, strategy, slot_bytes)):
                check_slot(tiles)


def test_starts_that_are_sums_are_told_as_such_whatever_their_rows_are():
    """Blocks of layers, with a short row, one that is split, and an empty one."""
    starts = np.add.outer(np.arange(7, dtype=np.uint64) << np.uint64(40), np.array([3, 1, 8, 2, 5], np.uint64) * 2**30)
    shift, length = np.array([0, 64, 96], np.uint64), np.array([24, 0, 3 * MAX_ROW_BYTES - 8], np.uint64)
    tile = Tile(starts.ravel(), starts.ravel() * np.uint64(2), shift, shift * np.uint64(2), length)
    assert tile.num_starts == 35
    assert numbers(check_slot((tile,))) < numbers([tile])


@st.composite
def nested(draw) -> Copies:
    """Rows out of loops in loops, some of which are cut off or replaced; addresses may be far apart, or backwards."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    source = target = np.array([1 << 40], np.uint64)
    length = np.array([16], np.uint64)
    for _ in range(draw(st.integers(1, 3))):
        extent = draw(st.integers(1, 9))
        steps = np.array([[dice.randrange(1 << 30) for _ in range(extent)] for _ in range(2)], np.uint64)
        if draw(st.booleans()):
            steps = np.arange(extent, dtype=np.uint64) * np.array([[dice.randrange(99)], [48]], np.uint64)
        source, target = (np.add.outer(side, step).ravel() for side, step in zip((source, target), steps, strict=True))
        length = np.add.outer(length, np.zeros(extent, np.uint64)).ravel()
        if draw(st.booleans()):
            length = length + np.tile(np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))), len(length))[
                : len(length)
            ].astype(np.uint64)
    rows = Copies(source, target, length, len(length))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(rows) - 1))
        for column in (rows.source, rows.target, rows.length):
            column[at] = draw(st.integers(0, 1 << 50))
    first = draw(st.integers(0, len(rows)))
    stop = draw(st.integers(first, len(rows)))
    return Copies(rows.source[first:stop], rows.target[first:stop], rows.length[first:stop] % np.uint64(200), len(rows))


@settings(max_examples=300)
@given(nested())
def test_tiles_have_the_rows_of_any_pattern(copies):
    check(copies)


@settings(max_examples=100)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=80))
def test_tiles_have_any_rows(rows):
    check(Copies(*np.array(rows, np.uint64).reshape(-1, 3).T.copy(), len(rows)))


def test_no_rows_are_no_tiles():
    assert tiles_of(NOTHING) == ()
    assert tiles_of(Copies(*np.array([[1, 2], [1, 2], [0, 0]], np.uint64), 2)) == ()


def request_of(formats: tuple[str, str], tokens: TokenRange, slot_bytes: int, strategy: Strategy) -> StagedRequest:
    """Of 32 layers from one rank to one of four, whose blocks have another size, at blocks in no order."""
    model = attention(num_layers=32, num_heads=8, head_dim=64, dtype="float16", item_bytes=2)
    shapes = EngineShape(1, 1, 16, 80, formats[0]), EngineShape(4, 1, 24, 80, formats[1])
    engines = [describe(model, shape, 1 << at) for shape, at in zip(shapes, (41, 50), strict=True)]
    (source,), target = engines[0], engines[1][1]
    dice = random.Random(5)
    tables = [(tuple(dice.sample(range(80), 80)),) for _ in shapes]
    program = bind(route(*engines).between(0, 1), source, target)
    return StagedRequest(program, *tables, (tokens,), strategy, slot_bytes)


@pytest.mark.parametrize("tokens", [TokenRange(0, 960), TokenRange(5, 1027)])
@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_slots_of_every_format_are_a_few_tiles(source, target, strategy, tokens):
    first = target if strategy is Strategy.PACK else source
    for found in moved(request_of((source, target), tokens, 8 * MIB, strategy)):
        tiles, rows = check_slot(found), rows_of(found)
        assert len(tiles) <= MOST_TILES
        # With all layers of a block side by side, what is beside each other differs from block to block.
        if FORMATS[first][0] != "B" and len(rows) >= 2048:
            assert 5 * numbers(tiles) < numbers([tile_of(rows)])


def test_a_token_major_slot_is_one_tile_of_hardly_any_numbers():
    """512 tokens of 64 tensors in rows of 256 bytes: 8 MiB, of whose 24 bytes a row one in fifty is left."""
    plan = request_of(("token-major", "token-major"), TokenRange(0, 512), 8 * MIB, Strategy.PACK)
    gather, _ = moved(plan)
    (tile,) = check_slot(gather)
    assert set(tile.length.tolist()) == {256}
    assert 50 * numbers([tile]) < numbers([tile_of(tile.copies())])


@pytest.mark.parametrize("slot_bytes", [100_001, 1_000_003])
def test_slots_that_end_in_the_middle_of_a_row_have_few_tiles(slot_bytes):
    """One block of all layers takes more than a slot: it is cut where the bytes happen to end."""
    plan = request_of(("block-major", "token-major"), TokenRange(0, 960), slot_bytes, Strategy.PACK)
    for found in moved(plan):
        assert len(check_slot(found)) <= MOST_TILES


@pytest.mark.parametrize("first", [1, 37, 60])
def test_rows_in_the_middle_of_a_pattern_are_found_from_both_ends(first):
    """Ten layers at 61 places, each in rows of two lengths, cut off in the middle of a layer and of a row."""
    dice = random.Random(3)
    places = np.array(dice.sample(range(1 << 20), 61), np.uint64) * np.uint64(256)
    source = np.add.outer(np.arange(10, dtype=np.uint64) << np.uint64(40), places).ravel()
    length = np.tile(np.where(np.arange(61) % 7, 256, 96).astype(np.uint64), 10)
    target = np.cumsum(length) - length
    rows = Copies(source[first:-20].copy(), target[first:-20].copy(), length[first:-20].copy(), 1)
    rows.source[0] += np.uint64(60)
    rows.target[0] += np.uint64(60)
    rows.length[0] -= np.uint64(60)
    rows.length[-1] -= np.uint64(8)
    tiles = check(rows)
    assert len(tiles) == 2
    assert 3 * numbers(tiles) < numbers([tile_of(rows)])


@pytest.mark.parametrize("at", range(0, 61 * 12, 61))
@pytest.mark.parametrize("column", range(3))
def test_a_layer_that_is_not_like_the_others_ends_a_pattern(at, column):
    """Twelve layers at 61 places, and a row more: at the beginning of one of them something is different."""
    places = np.array(random.Random(3).sample(range(1 << 20), 61), np.uint64) * np.uint64(256)
    source = np.append(np.add.outer(np.arange(12, dtype=np.uint64) << np.uint64(40), places).ravel(), np.uint64(1))
    rows = Copies(source, np.arange(len(source), dtype=np.uint64) << np.uint64(9), np.full(len(source), 96), 1)
    rows = Copies(rows.source, rows.target, rows.length.astype(np.uint64), 1)
    (rows.source, rows.target, rows.length)[column][at] += np.uint64(8)
    check(rows)


def test_one_row_that_is_elsewhere_is_not_put_where_the_pattern_has_it():
    """A guess looks at a few rows. Every row counts."""
    for at in (0, 1, 700, 4095):
        for column in range(3):
            rows = np.array([np.arange(4096) * 512, np.arange(4096) * 256, np.full(4096, 256)], np.uint64)
            rows[column][at] += np.uint64(1)
            check(Copies(*rows, 4096))


def test_as_many_rows_as_have_no_divisor_are_a_tile_and_a_rest():
    numbered = np.arange(4099, dtype=np.uint64)
    tiles = check(Copies(numbered * np.uint64(512), numbered * np.uint64(256), np.full(4099, 256, np.uint64), 1))
    assert numbers(tiles) < 600


def test_few_rows_are_left_as_they_are(monkeypatch):
    monkeypatch.undo()
    numbered = np.arange(patterns.MIN_ROWS, dtype=np.uint64) * np.uint64(16)
    rows = Copies(numbered, numbered, np.full(len(numbered), 16, np.uint64), 1)
    assert [
        tile.num_starts for tile in tiles_of(Copies(*(c[1:] for c in (rows.source, rows.target, rows.length)), 1))
    ] == [1]
    assert [tile.num_starts for tile in tiles_of(rows)] > [1]


def test_long_rows_in_a_pattern_are_several_rows_of_it():
    steps = np.arange(64, dtype=np.uint64)
    length = np.full(64, 2 * MAX_ROW_BYTES + 4096, np.uint64)
    (tile,) = check(Copies(steps << np.uint64(30), steps << np.uint64(20), length, 64))
    assert len(tile) == 3 * 64
    assert numbers([tile]) < 64 * 3


def test_rows_without_a_pattern_are_left_as_they_are():
    noise = np.random.default_rng(4).permutation(1 << 14).astype(np.uint64)
    (tile,) = check(Copies(noise * np.uint64(64), noise[::-1] * np.uint64(64), np.full(1 << 14, 64, np.uint64), 1))
    assert (tile.num_starts, tile.num_shifts) == (1, 1 << 14)
