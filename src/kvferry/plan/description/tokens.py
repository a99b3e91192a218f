"""Which tokens: ranges of a request, and the sets that ranks share out among themselves (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

from kvferry.errors import LayoutError
from kvferry.plan.description.span import Span, overlap

# Enough for any interleave in use, and too few to hurt when a peer makes them up.
MAX_PERIOD = 1 << 20
MAX_LOOKUPS = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens `first <= t < last` of a request; may be empty."""

    first: int
    last: int

    def __len__(self) -> int:
        return max(0, self.last - self.first)


@dataclass(frozen=True, slots=True, order=True)
class TokenSet:
    """The tokens `t` whose remainder `t % period` lies in one of `spans` (ascending, apart from one another)."""

    period: int
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        if self == ALL_TOKENS:
            return "all tokens"
        return f"tokens t with t % {self.period} in {' or '.join(str(span) for span in self.spans)}"


ALL_TOKENS = TokenSet(1, (Span(0, 1),))


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of one rank under context parallelism: of every `num_shares` runs of `run_tokens` tokens, one.

    Token `t` belongs to share `t // run_tokens % num_shares`; a rank stores its tokens without gaps.
    """

    num_shares: int = 1
    share: int = 0
    run_tokens: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.share < self.num_shares and self.run_tokens >= 1 and self.period <= MAX_PERIOD):
            expected = f"0 <= share < num_shares, run_tokens >= 1, together at most {MAX_PERIOD:,} tokens"
            raise LayoutError("invalid share of the tokens", found=repr(self), expected=expected)

    @property
    def period(self) -> int:
        return self.num_shares * self.run_tokens

    def tokens(self) -> TokenSet:
        """The tokens that this share has."""
        if self.num_shares == 1:
            return ALL_TOKENS
        start = self.share * self.run_tokens
        return TokenSet(self.period, (Span(start, start + self.run_tokens),))


UNSHARED = TokenShare()


@lru_cache(maxsize=4096)
def classes(wanted: TokenSet, held: tuple[TokenSet, ...]) -> tuple[tuple[TokenSet, tuple[int, ...]], ...]:
    """Divide the wanted tokens by who holds them: each class with the indices of the sets that have it.

    Tokens that no set has form a class with no index. Raises LayoutError when the sets interleave too finely.
    """
    period, num_spans = _together(wanted, held)
    if period > MAX_PERIOD or num_spans * (1 + len(held)) > MAX_LOOKUPS:
        raise LayoutError(
            "the two engines interleave tokens in sizes that are too different",
            found=f"{num_spans:,} runs of {1 + len(held):,} shares until they repeat together, after {period:,} tokens",
            expected=f"runs times shares at most {MAX_LOOKUPS:,}, {MAX_PERIOD:,} tokens",
            hint="choose interleave sizes of which one is a multiple of the other",
        )
    members = [_stretched(one, period) for one in (wanted, *held)]
    edges = sorted({edge for spans in members for span in spans for edge in (span.start, span.stop)})
    found: dict[tuple[int, ...], list[Span]] = {}
    for start, stop in pairwise(edges):
        inside = [index for index, spans in enumerate(members) if _covers(spans, start)]
        if inside and inside[0] == 0:
            found.setdefault(tuple(index - 1 for index in inside[1:]), []).append(Span(start, stop))
    return tuple((_reduced(period, spans), holders) for holders, spans in found.items())


def num_lookups(wanted: TokenSet, held: tuple[TokenSet, ...]) -> int:
    """What `classes` costs, whether or not it would refuse."""
    return _together(wanted, held)[1] * (1 + len(held))


def _together(wanted: TokenSet, held: tuple[TokenSet, ...]) -> tuple[int, int]:
    """The period after which all sets repeat together, and how many spans they have in it."""
    period = lcm(wanted.period, *(one.period for one in held))
    return period, sum(period // one.period * len(one.spans) for one in (wanted, *held))


def _stretched(tokens: TokenSet, period: int) -> Sequence[Span]:
    """The spans of a set over a multiple of its period. All tokens are one: there may be very many periods."""
    if tokens == ALL_TOKENS:
        return [Span(0, period)]
    shifts = range(0, period, tokens.period)
    return [Span(span.start + shift, span.stop + shift) for shift in shifts for span in tokens.spans]


def _covers(spans: Sequence[Span], token: int) -> bool:
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if spans[middle].stop <= token else (low, middle)
    return low < len(spans) and spans[low].start <= token


def _reduced(period: int, spans: list[Span]) -> TokenSet:
    """The same set with neighbours joined and the shortest period, so that equal sets are equal values."""
    joined: list[Span] = []
    for span in spans:
        start = joined.pop().start if joined and joined[-1].stop == span.start else span.start
        joined.append(Span(start, span.stop))
    if joined == [Span(0, period)]:
        return ALL_TOKENS
    edges = {span.start for span in joined} ^ {span.stop % period for span in joined}
    for repeats in range(len(joined), 1, -1):
        shift = period // repeats
        alike = _covers(joined, 0) == _covers(joined, shift)
        if alike and period % repeats == 0 and {(edge + shift) % period for edge in edges} == edges:
            return TokenSet(shift, tuple(part for span in joined for part in overlap(span, Span(0, shift))))
    return TokenSet(period, tuple(joined))
