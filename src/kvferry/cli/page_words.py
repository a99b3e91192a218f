"""Numbers and spans as a person reads them, and the spans of a plan's words as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "ALL",
    "TIMES",
    "Tokens",
    "axis_words",
    "boxes_of",
    "bytes_words",
    "count_words",
    "many_words",
    "seconds_words",
    "tokens_of",
]

BOX = re.compile(r"([^\s,]+) \[(\d+), (\d+)\)")
TIMES = "\N{MULTIPLICATION SIGN}"
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


def axis_words(axis: str, first: int, last: int) -> str:
    """`heads 0-1`, `layer 3`: both ends are held."""
    return f"{axis.replace('.', ' ')} {first}" if last - first == 1 else f"{_many(axis)} {first}–{last - 1}"  # noqa: RUF001


def many_words(number: int, axis: str) -> str:
    """`16 tokens`, `1 head`, `128 dim`."""
    return f"{number:,} {axis.replace('.', ' ') if number == 1 else _many(axis)}"


def _many(axis: str) -> str:
    """The plural of an axis; one that is named after its cache group too is `group.axis`."""
    words = axis.replace(".", " ")
    return words + "s" if axis.rsplit(".", 1)[-1] in ("token", "head", "channel", "layer", "group", "state") else words


def bytes_words(num_bytes: float) -> str:
    """Binary units, three digits."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or (unit == "B" and abs(size) < 1024):
            break
        size, unit = size / 1024, larger
    return f"{_digits(size)} {unit}"


def seconds_words(seconds: float) -> str:
    """The largest unit with a digit before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{_digits(seconds * factor)} {unit}"
    return ""


def count_words(number: float) -> str:
    """Thousands apart; millions in words, since nobody reads their digits."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{_digits(number / factor)} {unit}"
    return f"{number:,.0f}"


def _digits(number: float) -> str:
    if number == int(number) and number < 1000:
        return f"{number:.0f}"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"
