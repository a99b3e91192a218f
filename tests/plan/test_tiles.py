"""Rows as sums are the rows that they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.programs.copies import NOTHING, Copies
from kvferry.plan.programs.tiles import Tile, plain, rows_of

numbers = st.integers(0, 1 << 40)


def columns(count):
    return st.lists(numbers, min_size=count, max_size=count).map(lambda found: np.array(found, np.uint64))


@st.composite
def tiles(draw):
    starts, shifts = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    length = np.array(draw(st.lists(st.integers(0, 50), min_size=shifts, max_size=shifts)), np.uint64)
    return Tile(*(draw(columns(count)) for count in (starts, starts, shifts, shifts)), length)


def listed(tile):
    """What plain loops make of a tile."""
    return [
        (int(a + b), int(c + d), int(length))
        for a, c in zip(tile.source_start, tile.target_start, strict=True)
        for b, d, length in zip(tile.source_shift, tile.target_shift, tile.length, strict=True)
    ]


def rows(copies):
    return list(zip(copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True))


def bits(found):
    return sorted((source + i, target + i) for source, target, length in found for i in range(length))


@given(tiles())
def test_rows_are_all_sums_start_by_start(tile):
    assert rows(tile.copies()) == listed(tile)
    assert len(tile) == len(listed(tile)) == tile.num_starts * tile.num_shifts
    assert len(tile.columns()) == 2 * tile.num_starts + 3 * tile.num_shifts


@given(tiles(), numbers, numbers)
def test_elsewhere_they_are_as_far_from_each_other(tile, source, target):
    assert listed(tile.shifted(source, target)) == [(a + source, b + target, size) for a, b, size in listed(tile)]


@given(tiles(), st.integers(1, 20))
def test_cut_they_are_the_same_bytes(tile, most):
    cut = tile.split(most)
    assert all(0 < length <= most for _, _, length in listed(cut))
    assert bits(listed(cut)) == bits(listed(tile))


@given(st.lists(tiles(), max_size=3))
def test_several_are_one_after_another(found):
    assert rows(rows_of(found)) == [row for tile in found for row in listed(tile)]


def test_rows_without_a_pattern_are_a_tile_as_well():
    copies = Copies(*(np.array(column, np.uint64) for column in ([9, 3], [5, 8], [4, 2])), pieces=2)
    assert rows(rows_of(plain(copies))) == rows(copies)
    assert plain(NOTHING) == ()
