"""The examples of docs/design/examples.md, worked out there by hand: these numbers were not produced by the code."""

from dataclasses import replace

import pytest

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import attention
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route

SOURCE, TARGET = 1 << 20, 1 << 30


def shape(tp, block_tokens, num_blocks, form):
    return EngineShape(tp, 1, block_tokens, num_blocks, form)


def rows(sources, targets, pair, tables, tokens):
    """(source offset, target offset, length), relative to the first region of each rank."""
    source, target = sources[pair[0]], targets[pair[1]]
    program = bind(route(sources, targets).between(*pair), source, target)
    copies = copies_for(program, *tables, [tokens] * len(target.groups))
    columns = copies.source - source.regions[0].address, copies.target - target.regions[0].address, copies.length
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_example_1_equal_layouts_one_row_per_run_of_tokens():
    model = attention(num_layers=1, num_heads=1, head_dim=2, dtype="float16", item_bytes=2)
    source = describe(model, shape(1, 2, 4, "token-major"), SOURCE)
    target = describe(model, shape(1, 2, 4, "token-major"), TARGET)
    assert rows(source, target, (0, 0), ([[2, 0]], [[1, 3]]), TokenRange(0, 3)) == [
        (0, 24, 4),
        (16, 8, 8),
        (32, 56, 4),
        (48, 40, 8),
    ]


def test_example_2_one_rank_to_two_each_takes_its_head_token_by_token():
    model = attention(num_layers=1, num_heads=2, head_dim=2, dtype="float16", item_bytes=2)
    source = describe(model, shape(1, 2, 2, "token-major"), SOURCE)
    target = describe(model, shape(2, 2, 2, "token-major"), TARGET)
    assert rows(source, target, (0, 1), ([[1]], [[0]]), TokenRange(0, 2)) == [
        (20, 0, 4),
        (28, 4, 4),
        (52, 16, 4),
        (60, 20, 4),
    ]


def test_example_3_three_ranks_to_two_the_middle_one_is_shared():
    model = attention(num_layers=1, num_heads=6, head_dim=1, dtype="float16", item_bytes=2)
    source = describe(model, shape(3, 1, 1, "token-major"), SOURCE)
    target = describe(model, shape(2, 1, 1, "token-major"), TARGET)
    found = route(source, target)
    assert [(leg.source_rank, leg.target_rank, leg.state[-1], str(leg.box[0])) for leg in found.legs] == [
        (0, 0, "k", "[0, 2)"),
        (1, 0, "k", "[2, 3)"),
        (0, 0, "v", "[0, 2)"),
        (1, 0, "v", "[2, 3)"),
        (1, 1, "k", "[3, 4)"),
        (2, 1, "k", "[4, 6)"),
        (1, 1, "v", "[3, 4)"),
        (2, 1, "v", "[4, 6)"),
    ]
    assert found.sources_of(0) == (0, 1)
    assert found.targets_of(1) == (0, 1)
    assert rows(source, target, (1, 1), ([[0]], [[0]]), TokenRange(0, 1)) == [(2, 0, 2), (6, 6, 2)]


def test_example_4_larger_blocks_and_another_order_of_axes():
    model = attention(num_layers=1, num_heads=2, head_dim=1, dtype="float16", item_bytes=2)
    source = describe(model, shape(1, 2, 4, "head-major"), SOURCE)
    target = describe(model, shape(1, 4, 2, "head-major"), TARGET)
    assert rows(source, target, (0, 0), ([[3, 1]], [[1]]), TokenRange(0, 4)) == [
        (8, 20, 4),
        (12, 28, 4),
        (24, 16, 4),
        (28, 24, 4),
        (40, 52, 4),
        (44, 60, 4),
        (56, 48, 4),
        (60, 56, 4),
    ]


def test_adjacent_blocks_of_a_cache_with_all_layers_in_one_block_are_one_row():
    model = attention(num_layers=4, num_heads=2, head_dim=8, dtype="float16", item_bytes=2)
    source = describe(model, shape(1, 16, 64, "block-major"), SOURCE)
    target = describe(model, shape(1, 16, 64, "block-major"), TARGET)
    tables = [list(range(3, 11))], [list(range(40, 48))]
    (row,) = rows(source, target, (0, 0), tables, TokenRange(0, 128))
    assert row[2] == 128 * model.bytes_per_token


RING = Layout(
    states=(State("s", "int8", 1, (Axis("dim", 1),), per_token=True, window_tokens=3),),
    regions=(Region(SOURCE, 64, "dram", 0),),
    groups=(CacheGroup(block_tokens=2, num_blocks=4, ring_tokens=3),),
    placements=(Placement("s", 0, 0, 0, (Span(0, 1),), (1,), 2, 1),),
)
PLAIN = Layout(
    states=RING.states,
    regions=(Region(TARGET, 64, "dram", 0),),
    groups=(CacheGroup(block_tokens=4, num_blocks=4, ring_tokens=0),),
    placements=(Placement("s", 0, 0, 0, (Span(0, 1),), (1,), 4, 1),),
)


@pytest.mark.parametrize(
    ("last", "expected"),
    [(2, [(2, 0, 2)]), (5, [(2, 3, 1), (3, 8, 1)])],
    ids=["shorter than the window", "the window has wrapped"],
)
def test_a_sliding_window_moves_the_tokens_that_the_next_one_sees(last, expected):
    """Window 3, slots by position modulo 3 in blocks [1, 0]: token 3 is in slot 0, token 4 in slot 1."""
    assert rows((RING,), (PLAIN,), (0, 0), ([[1, 0]], [[0, 2]]), TokenRange(0, last)) == expected


def test_a_ring_of_two_holds_what_a_window_of_three_needs():
    """Of tokens 0 to 4 the next one sees 3 and 4: slots 0 and 1 modulo 3, slots 1 and 0 modulo 2."""
    small = replace(RING, groups=(CacheGroup(block_tokens=2, num_blocks=4, ring_tokens=2),), regions=PLAIN.regions)
    assert rows((RING,), (small,), (0, 0), ([[1, 0]], [[3]]), TokenRange(0, 5)) == [(2, 7, 1), (3, 6, 1)]
    assert rows((small,), (RING,), (0, 0), ([[3]], [[1, 0]]), TokenRange(0, 5)) == [(6, 3, 1), (7, 2, 1)]


def test_a_ring_at_the_target_alone_decides_what_is_moved():
    assert rows((PLAIN,), (RING,), (0, 0), ([[0, 2]], [[1, 0]]), TokenRange(0, 5)) == [(3, 2, 1), (8, 3, 1)]


def test_a_state_of_fixed_size_always_goes_whole():
    state = State("ssm", "float32", 4, (Axis("head", 2), Axis("state", 3)), per_token=False)

    def layout(address, strides, block_stride):
        placement = Placement("ssm", 0, 0, 0, (Span(0, 2), Span(0, 3)), strides, block_stride, 0)
        return Layout((state,), (Region(address, 256, "dram", 0),), (CacheGroup(1, 4, 0),), (placement,))

    source, target = layout(SOURCE, (12, 4), 24), layout(TARGET, (16, 4), 32)
    assert rows((source,), (target,), (0, 0), ([[2]], [[1]]), TokenRange(7, 7)) == [(48, 32, 12), (60, 48, 12)]
