"""A layout comes from a peer: absurd numbers are refused with a typed error, before they cost time or memory."""

import random
from dataclasses import replace

import pytest

from kvferry.errors import LayoutError, TooManyRowsError
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.span import MAX_STOP, Span
from kvferry.plan.description.tokens import TokenRange, TokenShare
from kvferry.plan.programs import program
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route

MOST = (1 << 64) - 1  # the largest number that a peer can send
TOKENS = State("tokens", "int8", 1, (Axis("dim", 1),), per_token=True, window_tokens=3)
FIXED = State("fixed", "int8", 1, (Axis("dim", 1),), per_token=False)
ONE = CacheGroup(block_tokens=1, num_blocks=1, ring_tokens=0)


def layout(state: State, group: CacheGroup, address: int, **changes) -> Layout:
    placement = Placement(state.name, 0, 0, 0, (Span(0, 1),), (1,), block_stride=1, token_stride=1)
    return Layout((state,), (Region(address, 64, "dram", 0),), (group,), (replace(placement, **changes),))


@pytest.mark.parametrize(
    ("state", "group", "changes"),
    [
        (TOKENS, {}, {"block_stride": MOST}),
        (TOKENS, {}, {"token_stride": MOST}),
        (TOKENS, {}, {"strides": (MOST,)}),
        (TOKENS, {"ring_tokens": MOST}, {}),
        (FIXED, {}, {"token_stride": MOST}),
        (FIXED, {"block_tokens": MOST}, {}),
        (FIXED, {"ring_tokens": MOST}, {}),
        (FIXED, {"block_tokens": MOST, "kernel_blocks": MOST}, {}),
        (FIXED, {"num_blocks": MOST}, {}),
    ],
)
def test_numbers_that_do_not_fit_an_address_are_refused(state, group, changes):
    with pytest.raises(LayoutError):
        layout(state, replace(ONE, **group), 1 << 20, **changes)


@pytest.mark.parametrize(
    ("state", "group", "changes"),
    [
        (TOKENS, {}, {"block_stride": 1 << 62, "token_stride": 1 << 62, "strides": (1 << 62,)}),
        (TOKENS, {"ring_tokens": MAX_STOP}, {}),
        (FIXED, {"block_tokens": MAX_STOP, "ring_tokens": MAX_STOP}, {"token_stride": 1 << 62}),
    ],
)
def test_the_largest_numbers_that_are_accepted_move_the_right_bytes(state, group, changes):
    source, target = layout(state, replace(ONE, **group), 1 << 20, **changes), layout(state, ONE, 1 << 62)
    bound = bind(route((source,), (target,)).legs, source, target)
    copies = copies_for(bound, [[0]], [[0]], [TokenRange(0, 1)])
    assert (copies.source.tolist(), copies.target.tolist(), copies.length.tolist()) == ([1 << 20], [1 << 62], [1])


def transposed(num_layers: int, extents: tuple[int, int]) -> tuple[Layout, Layout]:
    """Two engines that store the two axes of a state in opposite orders: every element is a row of its own."""
    axes = Axis("head", extents[0]), Axis("dim", extents[1])
    states = tuple(State(f"layer {layer}", "int8", 1, axes, per_token=False) for layer in range(num_layers))
    size = extents[0] * extents[1]
    found = []
    for address, strides in ((1 << 20, (1, extents[0])), (1 << 50, (extents[1], 1))):
        regions = tuple(Region(address + layer * size, size, "dram", 0) for layer in range(num_layers))
        spans = Span(0, extents[0]), Span(0, extents[1])
        placements = tuple(
            Placement(state.name, layer, 0, 0, spans, strides, size, 0) for layer, state in enumerate(states)
        )
        found.append(Layout(states, regions, (ONE,), placements))
    return found[0], found[1]


@pytest.mark.parametrize(("num_layers", "extents"), [(1, (1 << 12, 1 << 12)), (1 << 7, (1 << 9, 1 << 9))])
def test_memory_formats_that_tear_a_block_apart_are_refused_before_the_rows_are_listed(num_layers, extents):
    source, target = transposed(num_layers, extents)
    with pytest.raises(TooManyRowsError, match=r"one block would need too many small rows; found: \d+,\d+"):
        bind(route((source,), (target,)).legs, source, target)


@pytest.mark.parametrize("has_own_groups", [False, True], ids=["one group", "a group each"])
def test_layers_that_each_stay_below_the_limit_are_refused_together(monkeypatch, has_own_groups):
    """A peer that gives every layer strides or a cache group of its own would else have as many limits as layers."""
    monkeypatch.setattr(program, "MAX_SECTION_ROWS", 1 << 10)
    found = []
    for each in transposed(5, (1 << 4, 1 << 4)):
        groups = each.groups * 5 if has_own_groups else each.groups
        placements = tuple(
            replace(placement, block_stride=1024 * (1 + index), group=index if has_own_groups else 0)
            for index, placement in enumerate(each.placements)
        )
        found.append(replace(each, groups=groups, placements=placements))
    source, target = found
    with pytest.raises(TooManyRowsError, match="too many small rows"):
        bind(route((source,), (target,)).legs, source, target)
    monkeypatch.setattr(program, "MAX_SECTION_ROWS", 5 << 8)
    assert bind(route((source,), (target,)).legs, source, target).groups


EXTENTS = (128, 64, 128)


def cut(address: int, dice: random.Random) -> Layout:
    """A rank that holds some box of a state; of each axis another part."""
    edges = [sorted(dice.sample(range(extent + 1), 2)) for extent in EXTENTS]
    axes = tuple(Axis(name, extent) for name, extent in zip("abc", EXTENTS, strict=True))
    state = State("ssm", "int8", 1, axes, per_token=False)
    spans = tuple(Span(start, stop) for start, stop in edges)
    strides = len(spans[1]) * len(spans[2]), len(spans[2]), 1
    size = len(spans[0]) * strides[0]
    placement = Placement("ssm", 0, 0, 0, spans, strides, size, 0)
    return Layout((state,), (Region(address, size, "dram", 0),), (ONE,), (placement,))


def test_ranks_that_cut_every_axis_in_many_places_are_refused_before_that_takes_minutes():
    dice = random.Random(7)
    ranks = [cut(rank << 40, dice) for rank in range(1, 65)]
    with pytest.raises(LayoutError, match="divide the cache in too many different places"):
        route(ranks, ranks)


def shared(address: int, share: TokenShare) -> Layout:
    return layout(replace(TOKENS, window_tokens=0), replace(ONE, share=share), address)


def test_shares_that_repeat_together_only_after_too_many_runs_are_refused():
    """Each of the shares is harmless; to match them all would take minutes."""
    fine = [TokenShare(128, share, 1) for share in range(64)]
    sources = [shared(rank << 40, share) for rank, share in enumerate([*fine, TokenShare(2, 0, 1 << 16)])]
    with pytest.raises(LayoutError, match="interleave tokens in sizes that are too different"):
        route(sources, [shared(1 << 62, TokenShare())])


def test_a_thousand_shares_are_matched():
    sources = [shared(rank << 40, TokenShare(1 << 10, rank, 1)) for rank in range(1 << 10)]
    assert len(route(sources, [shared(1 << 62, TokenShare())]).legs) == 1 << 10
