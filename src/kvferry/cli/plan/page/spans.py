"""The spans in a plan's words, as numbers to draw with."""

from __future__ import annotations

import re
from dataclasses import dataclass

BOX = re.compile(r"([^\s,]+) \[(\d+), (\d+)\)")
TOKENS = re.compile(r"t % (\d+) in \[(\d+), (\d+)\)")


@dataclass(frozen=True, slots=True, order=True)
class Tokens:
    """The tokens t with t % period in [first, last)."""

    period: int
    first: int
    last: int

    def __contains__(self, token: int) -> bool:
        return self.first <= token % self.period < self.last

    def nth(self, index: int) -> int:
        """The token that a rank keeps at its place `index`."""
        width = self.last - self.first
        return index // width * self.period + self.first + index % width


ALL = Tokens(1, 0, 1)


def tokens_of(words: str) -> Tokens:
    """`all` and what cannot be drawn are ALL: the words themselves stand on the page in any case."""
    found = TOKENS.search(words)
    if not found:
        return ALL
    period, first, last = (int(number) for number in found.groups())
    return Tokens(period, first, last) if 0 <= first < last <= period else ALL


def boxes_of(words: list[str]) -> list[tuple[str, int, int]]:
    """(axis, first, last) of each span named in a pair's boxes."""
    return [(axis, int(first), int(last)) for text in words for axis, first, last in BOX.findall(text)]
