"""Shares of the tokens, and how the wanted ones are divided by who holds them, compared with counting one by one."""

from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange, TokenSet, TokenShare, classes

shares = st.integers(1, 4).flatmap(
    lambda number: st.builds(TokenShare, st.just(number), st.integers(0, number - 1), st.integers(1, 4))
)


def has(tokens: TokenSet, token: int) -> bool:
    return any(span.start <= token % tokens.period < span.stop for span in tokens.spans)


def members(tokens: TokenSet, stop: int) -> list[int]:
    return [token for token in range(stop) if has(tokens, token)]


def shortest_period(pattern: list[bool]) -> int:
    return next(
        n for n in range(1, len(pattern) + 1) if len(pattern) % n == 0 and pattern == pattern[:n] * (len(pattern) // n)
    )


@given(shares)
def test_a_share_has_its_runs(share):
    expected = [t for t in range(100) if t // share.run_tokens % share.num_shares == share.share]
    assert members(share.tokens(), 100) == expected


@pytest.mark.parametrize("numbers", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0), (1 << 20, 0, 2)])
def test_a_share_that_is_none_is_refused(numbers):
    with pytest.raises(LayoutError, match="invalid share of the tokens"):
        TokenShare(*numbers)


@settings(max_examples=100)
@given(shares, st.lists(shares, max_size=3))
def test_every_wanted_token_is_in_the_class_of_its_holders(wanted, held):
    sets = tuple(share.tokens() for share in held)
    period = lcm(*(one.period for one in (wanted.tokens(), *sets)))
    found = classes(wanted.tokens(), sets)
    assert len({holders for _, holders in found}) == len(found)
    together = sorted((token, holders) for tokens, holders in found for token in members(tokens, period))
    assert together == [
        (token, tuple(index for index, one in enumerate(sets) if has(one, token)))
        for token in members(wanted.tokens(), period)
    ]


@settings(max_examples=100)
@given(shares, st.lists(shares, max_size=3))
def test_equal_sets_are_equal_values(wanted, held):
    """The shortest period, spans as long as they can be: legs with the same tokens must have the same key."""
    for tokens, _ in classes(wanted.tokens(), tuple(share.tokens() for share in held)):
        pattern = [has(tokens, token) for token in range(tokens.period)]
        assert shortest_period(pattern) == tokens.period
        assert all(left.stop < right.start for left, right in zip(tokens.spans, tokens.spans[1:], strict=False))


def test_sets_of_different_periods_are_reduced():
    odd, first_of_four = TokenSet(2, (Span(1, 2),)), TokenSet(4, (Span(0, 1),))
    assert classes(ALL_TOKENS, (odd, first_of_four)) == (
        (first_of_four, (1,)),
        (odd, (0,)),
        (TokenSet(4, (Span(2, 3),)), ()),
    )
    assert classes(ALL_TOKENS, (first_of_four, TokenSet(4, (Span(2, 3),)))) == (
        (first_of_four, (0,)),
        (TokenSet(2, (Span(1, 2),)), ()),
        (TokenSet(4, (Span(2, 3),)), (1,)),
    )


def test_a_run_that_goes_on_in_the_next_period_is_one_run():
    wanted = TokenSet(4, (Span(0, 1), Span(3, 4)))
    assert classes(wanted, (TokenSet(8, (Span(1, 2),)),)) == ((wanted, ()),)


def test_shares_of_too_long_a_period_are_refused_with_the_number():
    wanted, held = TokenShare(2, 0, 1501).tokens(), TokenShare(3, 0, 1001).tokens()
    with pytest.raises(LayoutError, match=r"after 9,015,006 tokens; expected: .* 1,048,576 tokens"):
        classes(wanted, (held,))


def test_tokens_in_words():
    assert str(ALL_TOKENS) == "all tokens"
    assert str(TokenSet(8, (Span(0, 2), Span(4, 5)))) == "tokens t with t % 8 in [0, 2) or [4, 5)"
    assert len(TokenRange(3, 7)) == 4
    assert len(TokenRange(7, 3)) == 0
