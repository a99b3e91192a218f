"""Numbers of tokens, and the units in which they are copied, compared with counting one by one."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.description.layout import CacheGroup
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenSet, TokenShare, classes
from kvferry.plan.routing.selection import Selection, positions

many = settings(max_examples=100)


@st.composite
def token_sets(draw):
    period = draw(st.integers(1, 12))
    chosen = sorted(draw(st.sets(st.integers(0, period - 1), min_size=1)))
    return TokenSet(period, tuple(Span(token, token + 1) for token in chosen))


@st.composite
def groups(draw):
    kernel_blocks = draw(st.integers(1, 3))
    num_shares = draw(st.integers(1, 4))
    share = TokenShare(num_shares, draw(st.integers(0, num_shares - 1)), draw(st.integers(1, 6)))
    ring = draw(st.sampled_from([0, 0, 4, 6, 7])) if num_shares == 1 else 0
    return CacheGroup(kernel_blocks * draw(st.integers(1, 6)), 64, ring, kernel_blocks, share)


@many
@given(token_sets(), st.integers(0, 50))
def test_numbers_and_tokens(tokens, stop):
    expected = [t for t in range(stop) if any(span.start <= t % tokens.period < span.stop for span in tokens.spans)]
    selection = Selection.of(tokens)
    assert selection.num_before(stop) == len(expected)
    assert selection.token(np.arange(len(expected), dtype=np.int64)).tolist() == expected


@many
@given(groups())
def test_positions_count_the_tokens_of_a_rank(group):
    share = group.share
    own = [t for t in range(120) if t // share.run_tokens % share.num_shares == share.share]
    assert positions(replace(group, ring_tokens=0), np.array(own, np.int64)).tolist() == list(range(len(own)))


def together(group: CacheGroup, tokens: list[int]) -> bool:
    """Whether tokens lie slot after slot in one kernel block."""
    found = positions(group, np.array(tokens, np.int64)).tolist()
    found = [position % group.ring_tokens if group.ring_tokens else position for position in found]
    same_block = len({position // group.kernel_tokens for position in found}) == 1
    return same_block and found == list(range(found[0], found[0] + len(found)))


@settings(max_examples=60)
@given(groups(), groups())
def test_a_unit_stays_together_on_both_sides(source, target):
    for tokens, holders in classes(source.share.tokens(), (target.share.tokens(),)):
        if not holders:
            continue
        selection = Selection.of(tokens)
        unit = selection.unit(source, target)
        for start in range(0, 6 * unit, unit):
            run = selection.token(np.arange(start, start + unit, dtype=np.int64)).tolist()
            assert together(source, run)
            assert together(target, run)


def test_a_unit_is_as_large_as_it_can_be():
    """Else a request would fall apart into more rows than it must."""
    of_all = Selection.of(ALL_TOKENS)
    assert of_all.unit(CacheGroup(16, 4, 0), CacheGroup(64, 4, 0)) == 16
    assert of_all.unit(CacheGroup(24, 4, 0, kernel_blocks=2), CacheGroup(16, 4, 0)) == 4
    assert of_all.unit(CacheGroup(16, 4, 48), CacheGroup(16, 4, 0)) == 16
    assert of_all.unit(CacheGroup(16, 4, 24), CacheGroup(16, 4, 0)) == 8
    share = TokenShare(4, 1, 16)
    alike = CacheGroup(32, 4, 0, share=share)
    assert Selection.of(share.tokens()).unit(alike, alike) == 32
    assert Selection.of(share.tokens()).unit(alike, CacheGroup(32, 4, 0)) == 16
    assert Selection.of(share.tokens()).unit(CacheGroup(32, 4, 0, share=TokenShare(4, 1, 16)), CacheGroup(8, 4, 0)) == 8


def test_the_periods_of_a_set_need_not_begin_where_a_block_does():
    """Tokens 0 to 3 and 6 to 9: of blocks of 4, the second four lie in two."""
    group = CacheGroup(4, 4, 0)
    assert Selection.of(TokenSet(6, (Span(0, 4),))).unit(group, group) == 2
