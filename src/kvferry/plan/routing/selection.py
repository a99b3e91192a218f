"""The tokens that move between two ranks, counted one after the other, and where each lies on either side."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.description.layout import CacheGroup
from kvferry.plan.description.tokens import TokenSet

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A set of tokens in ascending order: number `n` is token `n // len(first) * period + first[n % len(first)]`.

    `first` are those of the first period. For a set of all tokens, number and token are the same.
    """

    period: int
    first: Indices

    @classmethod
    def of(cls, tokens: TokenSet) -> Selection:
        """The numbering of a set."""
        return cls(tokens.period, np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in tokens.spans]))

    def token(self, numbers: Indices) -> Indices:
        """The tokens with these numbers."""
        if self.period == 1:
            return numbers
        return numbers // len(self.first) * self.period + self.first[numbers % len(self.first)]

    def num_before(self, token: int) -> int:
        """How many tokens of the set come before `token`: the number of the first that does not."""
        periods, rest = divmod(token, self.period)
        return periods * len(self.first) + int(np.searchsorted(self.first, rest))

    def unit(self, source: CacheGroup, target: CacheGroup) -> int:
        """The largest number of tokens such that each run of so many, from a multiple of it on, stays together on both
        sides: slot after slot, in one kernel block each."""
        # One number more than a period, to see whether the next period goes on where this one ends.
        tokens = self.token(np.arange(len(self.first) + 1, dtype=np.int64))
        sides = [(positions(group, tokens), group) for group in (source, target)]
        together = (np.diff(sides[0][0]) == 1) & (np.diff(sides[1][0]) == 1)
        starts = np.flatnonzero(np.concatenate(([True], ~together[:-1])))
        cuts = [group.kernel_tokens for _, group in sides] + [group.ring_tokens for _, group in sides]
        cuts += [int(number) for at, _ in sides for number in at[starts]]
        if not together.all():
            cuts += [len(self.first), *starts.tolist()]
            cuts += [int(at[-1] - at[0]) for at, _ in sides]
        return gcd(*cuts)


def positions(group: CacheGroup, tokens: Indices) -> Indices:
    """How many tokens of a rank come before each of its tokens: its place among the rank's own tokens."""
    share = group.share
    if share.num_shares == 1:
        return tokens
    return tokens // share.period * share.run_tokens + tokens % share.run_tokens
