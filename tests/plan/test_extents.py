"""Extents that lie upon one another, checked against the bytes that each takes, one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.extents import Extent, overlapping
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import attention

MODEL = attention(num_layers=2, num_heads=2, head_dim=4, dtype="float16", item_bytes=2)
FORMATS = ["".join(letters) for letters in permutations("LKBNHD")]


def bytes_of(extent: Extent) -> set[int]:
    starts = [sum(at) for at in product(*(range(0, stride * count, stride) for stride, count in extent.steps))]
    return {extent.start + start + at for start in starts for at in range(extent.item_bytes)}


def bytes_are_shared(extents: list[Extent]) -> bool:
    return max(Counter(at for extent in extents for at in bytes_of(extent)).values()) > 1


@st.composite
def nested(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...]]:
    item_bytes = inside = draw(st.sampled_from([1, 2, 4]))
    steps: list[tuple[int, int]] = []
    for count in draw(st.lists(st.integers(2, 4), max_size=3)):
        stride = inside + draw(st.sampled_from([0, 0, 1, 2, 4, 8, inside]))
        steps.insert(0, (stride, count))
        inside += (count - 1) * stride
    return item_bytes, tuple(steps)


STARTS = st.lists(st.integers(0, 60), min_size=2, max_size=5)


@given(STARTS, st.lists(nested(), min_size=5, max_size=5))
def test_what_is_said_to_overlap_does(starts, shapes):
    extents = [Extent(str(start), start, *shape) for start, shape in zip(starts, shapes, strict=False)]
    if two := overlapping(extents):
        assert bytes_of(two[0]) & bytes_of(two[1])


@given(STARTS, nested())
def test_what_recurs_alike_within_a_distance_is_told_exactly(starts, shape):
    item_bytes, steps = shape
    extents = [Extent(str(start), start, item_bytes, steps) for start in starts]
    # Each of the outermost step is one piece, and those of all lie within the distance.
    assume(all(extent.first.is_solid for extent in extents))
    assume(steps == () or max(extent.first.stop for extent in extents) - min(starts) <= steps[0][0])
    assert bool(overlapping(extents)) == bytes_are_shared(extents)


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_moved_onto_another_is_refused_in_every_format(format):
    (layout,) = describe(MODEL, EngineShape(1, 1, 4, 8, format), 1 << 20)
    for number, placement in enumerate(layout.placements):
        for other in (each for each in layout.placements if each is not placement):
            moved = replace(placement, offset=other.offset, region=other.region)
            with pytest.raises(LayoutError, match="two states lie in the same memory"):
                with_placement(layout, number, moved)


def with_placement(layout: Layout, number: int, placement: object) -> Layout:
    placements = list(layout.placements)
    placements[number] = placement
    return replace(layout, placements=tuple(placements))


@pytest.mark.parametrize("format", ["interleaved", "packed", "block-major"])
def test_a_state_that_begins_within_another_is_refused(format):
    (layout,) = describe(MODEL, EngineShape(1, 1, 4, 8, format), 1 << 20)
    moved = replace(layout.placements[1], offset=layout.placements[1].offset - 2)
    with pytest.raises(LayoutError, match=r"k at offset 0 and model.layers.0.v at offset"):
        with_placement(layout, 1, moved)


def test_groups_may_share_memory():
    (layout,) = describe(MODEL, EngineShape(1, 1, 4, 8, "block-major"), 1 << 20)
    second = layout.groups[0]
    moved = replace(layout.placements[1], offset=0, group=1)
    assert with_placement(replace(layout, groups=(*layout.groups, second)), 1, moved).placements[1].offset == 0


def test_memory_in_two_regions_is_refused():
    (layout,) = describe(MODEL, EngineShape(1, 1, 4, 8, "token-major"), 1 << 20)
    first, second, *others = layout.regions
    inside = replace(second, address=first.address + first.size_bytes - 1)
    with pytest.raises(LayoutError, match="regions overlap"):
        replace(layout, regions=(first, inside, *others))
    elsewhere = replace(inside, device=1)
    assert replace(layout, regions=(first, elsewhere, *others)).regions[1] is elsewhere
