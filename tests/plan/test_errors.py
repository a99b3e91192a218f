"""Everything that a description or a request can get wrong is named, with what was found and what was expected."""

from dataclasses import replace

import pytest

from kvferry.errors import (
    BlockTableError,
    ConfigurationError,
    IncompatibleError,
    LayoutError,
    TooManyRowsError,
    UncoveredError,
)
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import (
    Axis,
    CacheGroup,
    Layout,
    Placement,
    Region,
    State,
    fingerprint,
    sharing_parts,
)
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import MAX_STOP, Span, overlap, shares, stages, uncovered
from kvferry.plan.description.tokens import TokenRange, TokenShare
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for, volume
from kvferry.plan.routing.route import route

MODEL = attention(num_layers=2, num_heads=4, head_dim=2, dtype="float16", item_bytes=2)
SHAPE = EngineShape(1, 1, 4, 8, "token-major")
(LAYOUT,) = describe(MODEL, SHAPE, 1 << 20)


def changed(**changes) -> Layout:
    return replace(LAYOUT, **changes)


def with_placement(**changes) -> Layout:
    first: Placement = replace(LAYOUT.placements[0], **changes)
    return changed(placements=(first, *LAYOUT.placements[1:]))


def with_group(state_changes=None, **changes) -> Layout:
    states = tuple(replace(state, **(state_changes or {})) for state in LAYOUT.states)
    return changed(states=states, groups=(replace(LAYOUT.groups[0], **changes),))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Span(3, 3), "a span must not be empty"),
        (lambda: Span(-1, 3), "a span must not be empty"),
        (lambda: with_placement(offset=10_000), "leaves its region"),
        (lambda: with_placement(block_stride=1 << 40), "leaves its region"),
        (lambda: with_placement(offset=-4), "must not be negative"),
        (lambda: with_placement(strides=(4, 1)), "overlap"),
        (lambda: with_placement(state="other"), "no such state"),
        (lambda: with_placement(state="model.layers.0.v"), "a rank must hold a state once"),
        (lambda: with_placement(region=9), "region or group does not exist"),
        (lambda: with_placement(group=-1), "region or group does not exist"),
        (lambda: with_placement(spans=(Span(0, 4),)), "one span and one stride per axis"),
        (lambda: with_placement(spans=(Span(0, 5), Span(0, 2))), r"span leaves axis head; found: \[0, 5\)"),
        (lambda: changed(states=(*LAYOUT.states, LAYOUT.states[0])), "state names must be unique"),
        (lambda: changed(states=(replace(LAYOUT.states[0], item_bytes=0),)), "sizes must be positive"),
        (lambda: changed(regions=(Region((1 << 64) - 63, 64, "dram", 0), *LAYOUT.regions[1:])), "address space"),
        (lambda: changed(groups=(replace(LAYOUT.groups[0], num_blocks=0),)), "needs blocks"),
        (lambda: with_group(ring_tokens=-1), "needs blocks"),
        (lambda: with_group(kernel_blocks=3), "kernel blocks must divide a block; found: 3 in a block of 4 tokens"),
        (lambda: with_group(ring_tokens=4), "expected: no ring, as the state has neither window nor chunks"),
        (lambda: with_group(ring_tokens=4, share=TokenShare(2, 0)), "a ring cannot be divided by context"),
        (lambda: with_group({"window_tokens": 6}, ring_tokens=4), "still seen; found: 4 tokens; expected: at least 5"),
        (lambda: with_group({"chunk_tokens": 6}, ring_tokens=5), "still seen; found: 5 tokens; expected: at least 6"),
        (lambda: with_group({"window_tokens": -1}), "a window or chunks or neither"),
        (lambda: with_group({"chunk_tokens": -1}), "a window or chunks or neither"),
        (lambda: with_group({"window_tokens": 6, "chunk_tokens": 6}), "a window or chunks or neither"),
        (lambda: with_group({"window_tokens": 6, "per_token": False}), "a window or chunks or neither"),
        (lambda: with_group({"compress_ratio": 0}), "cannot be compressed"),
        (lambda: with_group({"compress_ratio": MAX_STOP + 1}), "cannot be compressed"),
        (lambda: with_group({"compress_ratio": 4, "window_tokens": 6}), "neither window nor chunks"),
        (lambda: with_group({"compress_ratio": 4, "per_token": False}), "cannot be compressed"),
        (lambda: changed(regions=(replace(LAYOUT.regions[0], address=-1), *LAYOUT.regions[1:])), "address space"),
        (lambda: changed(regions=(replace(LAYOUT.regions[0], size_bytes=0), *LAYOUT.regions[1:])), "address space"),
        (lambda: with_placement(region=4), "region or group does not exist"),
        (lambda: with_placement(group=1), "region or group does not exist"),
        (lambda: with_placement(offset=1), "leaves its region; found: last byte at 513; expected: at most 512"),
        (lambda: with_placement(token_stride=15), "overlap; found: a stride of 15 bytes; expected: at least the 16"),
        (lambda: with_placement(block_stride=63), "overlap; found: a stride of 63 bytes; expected: at least the 64"),
        (lambda: Span(0, MAX_STOP + 1), "a span must not be empty"),
        (lambda: replace(SHAPE, tensor_parallel=1 << 20), "too many ranks; found: 1,048,576"),
        (lambda: shares(8, 3, "heads"), "heads cannot be divided over the ranks; found: 8 over 3 ranks"),
        (lambda: shares(8, 0, "heads"), "cannot be divided"),
        (lambda: replace(SHAPE, block_tokens=0), "every size of an engine must be at least 1"),
        (lambda: attention(-3, 4, 2, "float16", 2), "every number of a model must be at least 1"),
        (lambda: stages(2, 3), "every pipeline stage needs a layer"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(build, says):
    with pytest.raises(LayoutError, match=says):
        build()


def test_what_just_fits_is_accepted():
    """The other side of each limit above."""
    with_group({"window_tokens": 6}, ring_tokens=5)
    with_group({"chunk_tokens": 6}, ring_tokens=6)
    with_group(kernel_blocks=4, num_blocks=2)
    changed(regions=(replace(LAYOUT.regions[0], address=0), *LAYOUT.regions[1:]))
    changed(regions=(replace(LAYOUT.regions[0], address=2**64 - 512), *LAYOUT.regions[1:]))
    # A stride that nothing is multiplied with may be anything.
    one = Placement("s", 0, 0, 0, (Span(3, 4),), (0,), 0, 0)
    state, group = State("s", "int8", 1, (Axis("dim", 4),), per_token=True), CacheGroup(1, 1, 0)
    assert Layout((state,), (Region(0, 1, "dram", 0),), (group,), (one,)).placements == (one,)
    assert len(Span(0, MAX_STOP)) == MAX_STOP


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigurationError, match=r"unknown cache format; found: diagonal; expected: one of token-major"
    ):
        describe(MODEL, replace(SHAPE, format="diagonal"), 0)


def test_all_differences_of_two_models_are_listed_at_once():
    other = attention(num_layers=3, num_heads=2, head_dim=2, dtype="float32", item_bytes=4)
    (theirs,) = describe(other, SHAPE, 1 << 30)
    with pytest.raises(IncompatibleError) as caught:
        route((LAYOUT,), (theirs,))
    assert "state model.layers.0.k: dtype float16 at the source, float32 at the target" in caught.value.differences
    assert "state model.layers.0.k: element size 2 at the source, 4 at the target" in caught.value.differences
    assert "state model.layers.0.k: extents [4, 2] at the source, [2, 2] at the target" in caught.value.differences
    assert "state model.layers.2.k: only the target has it" in caught.value.differences
    assert len(caught.value.differences) == 3 * 4 + 2
    with pytest.raises(IncompatibleError, match="only the source has it"):
        route((theirs,), (LAYOUT,))


def test_ranks_of_one_engine_that_contradict_one_another_are_named():
    other = changed(states=tuple(replace(state, dtype="bfloat16") for state in LAYOUT.states))
    for sources, targets, side in [((LAYOUT, other), (other,), "source"), ((LAYOUT,), (other, LAYOUT), "target")]:
        with pytest.raises(IncompatibleError) as caught:
            route(sources, targets)
        assert caught.value.differences == tuple(
            f"state {state.name}: rank 0 of the {side} describes it differently from another rank"
            for state in sorted(LAYOUT.states, key=lambda state: state.name)
        )


def test_limits_of_what_a_token_sees_are_a_difference():
    theirs = with_group({"window_tokens": 6}), with_group({"chunk_tokens": 6})
    for layout, says in zip(theirs, ("window 0 at the source, 6 at", "chunks 0 at the source, 6 at"), strict=True):
        with pytest.raises(IncompatibleError, match=says):
            route((LAYOUT,), (layout,))


def test_other_axes_are_a_difference():
    states = tuple(replace(s, axes=(Axis("head", 4), Axis("channel", 2)), per_token=False) for s in LAYOUT.states)
    with pytest.raises(IncompatibleError, match=r"axes \['head', 'dim'\] at the source, \['head', 'channel'\]"):
        route((LAYOUT,), (changed(states=states),))


def test_a_part_that_nobody_holds_is_named():
    ranks = describe(MODEL, replace(SHAPE, tensor_parallel=4), 1 << 20)
    with pytest.raises(UncoveredError, match=r"state model.layers.0.k; found: head \[2, 3\)"):
        route((ranks[0], ranks[1], ranks[3]), (LAYOUT,))


def test_tokens_that_nobody_holds_are_named_with_the_box():
    shares_of_three = [changed(groups=(replace(LAYOUT.groups[0], share=TokenShare(3, i, 2)),)) for i in range(3)]
    with pytest.raises(
        UncoveredError, match=r"state .*; found: head \[0, 4\), dim \[0, 2\), token: tokens t with t % 6 in \[2, 4\)"
    ):
        route((shares_of_three[0], shares_of_three[2]), (LAYOUT,))


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ([[0, 1]], [[0, 1, 2]], "source group 0 has too few blocks for the tokens; found: 2 blocks of 4 tokens"),
        ([[0, 1, 2]], [[0]], "target group 0 has too few blocks"),
        ([[0, 1, 9]], [[0, 1, 2]], "source group 0 names blocks that do not exist; found: 9; expected: 0 <="),
        ([[8, 1, 2]], [[0, 1, 2]], "source group 0 has no blocks for some of the tokens; found: 1 of 3 blocks are not"),
        ([[0, 1, 2]], [[0, -1, 2]], "target group 0 names blocks that do not exist; found: -1;"),
        ([[0, 1, 2]], [[0, 1, 0]], "target group 0 names a block twice"),
        ([[0, 0, 2]], [[0, 1, 2]], "source group 0 names a block twice"),
        ([], [[0, 1, 2]], "source block table missing; found: 0 tables; expected: group 0"),
        ([[0, 1.0, 2]], [[0, 1, 2]], r"source group 0: block ids are 64-bit integers; found: 0, 1.0, 2"),
        ([[0, 1, 2]], [[0, 1, 1 << 63]], "target group 0: block ids are 64-bit integers"),
        ([[0, None, 2]], [[0, 1, 2]], "block ids are 64-bit integers; found: 0, None, 2"),
        ([[0, 1, 2]], [["a", 1, 2]], "block ids are 64-bit integers; found: 'a', 1, 2"),
    ],
)
def test_block_tables_that_do_not_fit_are_refused(source, target, says):
    program = bind(route((LAYOUT,), (LAYOUT,)).legs, LAYOUT, LAYOUT)
    with pytest.raises(BlockTableError, match=says):
        copies_for(program, source, target, [TokenRange(0, 10)])


def test_everything_that_is_wrong_with_the_tables_is_said_at_once():
    program = bind(route((LAYOUT,), (LAYOUT,)).legs, LAYOUT, LAYOUT)
    with pytest.raises(BlockTableError) as caught:
        copies_for(program, [[0, 99, -7]], [[5, 5, 1]], [TokenRange(0, 10)])
    assert "source group 0 names blocks that do not exist; found: -7, 99" in str(caught.value)
    assert "target group 0 names a block twice; found: 5" in str(caught.value)


def test_no_error_is_longer_than_a_refusal_may_be():
    """Layouts come from peers: thousands of differences are counted, not told."""
    names = tuple(f"only ours, number {number}" for number in range(5_000))
    error = IncompatibleError(names)
    assert error.differences == names
    assert "and 4980 more" in error.found
    assert len(LayoutError("x" * 10_000, found="y" * 10_000).what) == 2048


def test_blocks_beyond_the_range_do_not_matter():
    program = bind(route((LAYOUT,), (LAYOUT,)).legs, LAYOUT, LAYOUT)
    copies = copies_for(program, [[0, 1, 99]], [[4, 5]], [TokenRange(2, 8)])
    assert copies.num_bytes == 6 * MODEL.bytes_per_token


@pytest.mark.parametrize("tokens", [TokenRange(5, 3), TokenRange(-1, 3)])
def test_a_range_that_runs_backwards_is_refused(tokens):
    program = bind(route((LAYOUT,), (LAYOUT,)).legs, LAYOUT, LAYOUT)
    with pytest.raises(BlockTableError, match="not a token range"):
        copies_for(program, [[0, 1]], [[0, 1]], [tokens])


def test_a_range_per_group_is_needed():
    program = bind(route((LAYOUT,), (LAYOUT,)).legs, LAYOUT, LAYOUT)
    with pytest.raises(
        BlockTableError, match="a token range is missing; found: 0 ranges; expected: one per cache group"
    ):
        copies_for(program, [[0]], [[0]], [])


@pytest.mark.parametrize("tokens", [TokenRange(0, 0), TokenRange(3, 5), TokenRange(3, 13), TokenRange(4, 12)])
@pytest.mark.parametrize("form", ["token-major", "LKBNDH", "block-head-major"])
def test_the_number_of_rows_is_known_before_they_are_listed(tokens, form):
    """Of scattered blocks, where no two rows join."""
    (target,) = describe(MODEL, replace(SHAPE, format=form), 1 << 30)
    program = bind(route((LAYOUT,), (target,)).legs, LAYOUT, target)
    ids = [6, 4, 2, 0]
    assert volume(program, [tokens])[0] == len(copies_for(program, [ids], [ids], [tokens]))


def test_rows_are_not_joined_across_regions_of_either_side():
    """They may be registered apart, though their addresses follow one another."""
    states = tuple(State(name, "int8", 1, (), per_token=False) for name in "ab")
    group = CacheGroup(1, 1, 0)

    def layout(address: int, num_regions: int) -> Layout:
        regions = tuple(Region(address + index, 3 - num_regions, "dram", 0) for index in range(num_regions))
        places = ((0, 0), (1, 0)) if num_regions > 1 else ((0, 0), (0, 1))
        placements = tuple(
            Placement(s.name, *at[:1], 0, at[1], (), (), 2, 0) for s, at in zip(states, places, strict=True)
        )
        return Layout(states, regions, (group,), placements)

    for num_sources, num_targets, expected in [(1, 1, [2]), (2, 1, [1, 1]), (1, 2, [1, 1]), (2, 2, [1, 1])]:
        source, target = layout(1 << 20, num_sources), layout(1 << 30, num_targets)
        program = bind(route((source,), (target,)).legs, source, target)
        assert copies_for(program, [[0]], [[0]], [TokenRange(0, 0)]).length.tolist() == expected


def test_a_request_in_too_many_rows_is_refused_before_they_are_listed():
    (other,) = describe(MODEL, replace(SHAPE, num_blocks=1 << 24, format="LKBNDH"), 1 << 40)
    (plain,) = describe(MODEL, replace(SHAPE, num_blocks=1 << 24), 1 << 45)
    program = bind(route((other,), (plain,)).legs, other, plain)
    with pytest.raises(TooManyRowsError, match="too many small rows"):
        copies_for(program, [[]], [[]], [TokenRange(0, 1 << 24)])


def test_a_fingerprint_names_the_description_not_the_addresses():
    (moved,) = describe(MODEL, SHAPE, 1 << 40)
    (other,) = describe(MODEL, replace(SHAPE, block_tokens=8), 1 << 20)
    assert fingerprint(moved) == fingerprint(LAYOUT)
    assert fingerprint(other) != fingerprint(LAYOUT)


def test_spans():
    assert overlap(Span(0, 4), Span(4, 6)) == ()
    assert overlap(Span(0, 5), Span(4, 6)) == (Span(4, 5),)
    assert uncovered(Span(0, 9), [Span(4, 6), Span(1, 2)]) == (Span(0, 1), Span(2, 4), Span(6, 9))
    assert uncovered(Span(0, 2), [Span(0, 3)]) == ()
    assert shares(2, 4, "heads") == (Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2))
    assert stages(5, 2) == (Span(0, 3), Span(3, 5))


def test_equal_layouts_at_other_addresses_share_their_parts():
    (here,), (there,) = (describe(MODEL, SHAPE, address) for address in (1 << 30, 3 << 30))
    one, other = sharing_parts(here), sharing_parts(there)
    assert (one, other) == (here, there)
    assert one.placements is other.placements
    assert one.states is other.states
    assert one.groups is other.groups
    assert one.regions != other.regions
