"""Where a fetch may write behind a request's last token, blocks are not taken apart there."""

from dataclasses import replace

import pytest

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import CacheGroup, Layout, Placement, Region, State
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route

MODEL = attention(num_layers=1, num_heads=1, head_dim=2, dtype="float16", item_bytes=2)
SOURCE, TARGET = 1 << 20, 1 << 30


def rows(source_block, target_block, tokens, tail_is_free):
    (source,) = describe(MODEL, EngineShape(1, 1, source_block, 8, "LKBHDN"), SOURCE)
    (target,) = describe(MODEL, EngineShape(1, 1, target_block, 8, "LKBHDN"), TARGET)
    target = replace(target, groups=tuple(replace(group, tail_is_free=tail_is_free) for group in target.groups))
    program = bind(route((source,), (target,)).legs, source, target)
    copies = copies_for(program, [[2, 5]], [[1, 3]], [tokens])
    return sorted((copies.target - TARGET).tolist()), sorted(copies.length.tolist())


def test_a_request_that_ends_inside_a_block_moves_whole_blocks():
    """Keys column by column: four tokens of a block are one row of 16 bytes, but three of them are two rows of 6."""
    assert rows(4, 4, TokenRange(0, 7), tail_is_free=True) == ([16, 48, 144, 176], [16] * 4)
    starts, lengths = rows(4, 4, TokenRange(0, 7), tail_is_free=False)
    assert (len(starts), sum(lengths)) == (6, 2 * (16 + 2 * 6))


def test_the_start_of_a_range_is_never_rounded():
    """What lies before it may be somebody else's."""
    starts, lengths = rows(4, 4, TokenRange(1, 7), tail_is_free=True)
    assert sum(lengths) == 2 * (2 * 6 + 16)
    assert min(starts) == 18


def test_only_so_far_as_both_blocks_reach():
    """Blocks of 4 and 6: pieces of two tokens lie in one block on either side, so one token more moves."""
    assert sum(rows(4, 6, TokenRange(0, 5), tail_is_free=True)[1]) == 2 * 6 * 4


@pytest.mark.parametrize("tokens", [TokenRange(0, 0), TokenRange(3, 3)])
def test_nothing_stays_nothing(tokens):
    assert rows(4, 4, tokens, tail_is_free=True) == ([], [])


def test_whole_blocks_are_one_row_however_their_insides_are_ordered():
    """Keys column by column, values row by row, one behind the other: one row a block, as both sides agree."""
    (source,) = describe(MODEL, EngineShape(1, 1, 4, 8, "LBKHDN"), SOURCE)
    (target,) = describe(MODEL, EngineShape(1, 1, 4, 8, "LBKHDN"), TARGET)
    mixed = [
        replace(
            layout, placements=(layout.placements[0], replace(layout.placements[1], strides=(4, 2), token_stride=4))
        )
        for layout in (source, target)
    ]
    program = bind(route(mixed[:1], mixed[1:]).legs, *mixed)
    copies = copies_for(program, [[2, 5]], [[1, 3]], [TokenRange(0, 8)])
    assert (copies.source - SOURCE).tolist() == [64, 160]
    assert (copies.target - TARGET).tolist() == [32, 96]
    assert copies.length.tolist() == [32, 32]


def test_in_a_ring_the_tail_is_the_past_and_is_left_alone():
    """Window 5 in a ring of 4: behind token 5 lies token 2, which the next one still sees."""
    state = State("s", "int8", 1, (), per_token=True, window_tokens=5)
    ring = CacheGroup(block_tokens=2, num_blocks=8, ring_tokens=4, tail_is_free=True)
    plain = CacheGroup(block_tokens=2, num_blocks=8, ring_tokens=0)
    source, target = (
        Layout((state,), (Region(address, 64, "dram", 0),), (group,), (Placement("s", 0, 0, 0, (), (), 2, 1),))
        for address, group in ((SOURCE, plain), (TARGET, ring))
    )
    program = bind(route((source,), (target,)).legs, source, target)
    copies = copies_for(program, [[0, 1, 2]], [[3, 5]], [TokenRange(0, 5)])
    written = [int(t) + i for t, n in zip(copies.target - TARGET, copies.length, strict=True) for i in range(int(n))]
    assert sorted(written) == [6, 7, 10, 11], "tokens 4, 1, 2 and 3, each once"
