"""Neighbouring rows are joined within a region, and never across two."""

import numpy as np
import pytest

from kvferry.plan.copies import Copies, merge


@pytest.mark.parametrize(("regions", "lengths"), [((0, 0, 0), [12, 8]), ((0, 1, 1), [4, 8, 8])])
def test_neighbours_on_both_sides_are_one_row(regions, lengths):
    rows = Copies(*(np.array(column, np.uint64) for column in ([0, 4, 100], [50, 54, 70], [4, 8, 8])), pieces=3)
    merged = merge(rows, np.array(regions))
    assert merged.length.tolist() == lengths
    assert (merged.num_bytes, merged.pieces) == (20, 3)
