"""Rows are joined with their neighbours, cut, and moved, and stay the same bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.programs.copies import Copies, merge, split


@pytest.mark.parametrize(("regions", "lengths"), [((0, 0, 0), [12, 8]), ((0, 1, 1), [4, 8, 8])])
def test_neighbours_on_both_sides_are_one_row(regions, lengths):
    rows = Copies(*(np.array(column, np.uint64) for column in ([0, 4, 100], [50, 54, 70], [4, 8, 8])), pieces=3)
    merged = merge(rows, np.array(regions))
    assert merged.length.tolist() == lengths
    assert (merged.num_bytes, merged.pieces) == (20, 3)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 40))
def test_split_keeps_every_byte(lengths, most):
    length = np.array(lengths, np.uint64)
    end = np.cumsum(length + np.uint64(3))
    copies = Copies(end + np.uint64(1000), end + np.uint64(9000), length, len(lengths))
    found = split(copies, most)
    assert not len(found) or (int(found.length.min()) > 0 and int(found.length.max()) <= most)
    assert bytes_of(found) == bytes_of(copies)


def bytes_of(copies):
    return [
        (source + i, target + i)
        for source, target, length in zip(
            copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True
        )
        for i in range(length)
    ]


def test_rows_elsewhere_have_the_same_lengths():
    rows = Copies(*(np.array(column, np.uint64) for column in ([0, 4], [50, 10], [4, 8])), pieces=3)
    there = rows.shifted(100, 7)
    assert (there.source.tolist(), there.target.tolist(), there.length.tolist()) == ([100, 104], [57, 17], [4, 8])
    assert there.pieces == 3
