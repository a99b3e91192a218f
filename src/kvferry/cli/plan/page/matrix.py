"""The small matrices of a rank: layers downwards, one panel per divided axis; tokens that alternate are stripes.

The spans in a plan's words become numbers to draw with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

COLOURS = 16
MAX_PANELS = 3
PANEL_GAP = 4.0
# The thinnest stripe, and the longest pattern before it repeats: both in units of the drawing.
STRIPE, LONGEST = 5.0, 40.0
Span = tuple[int, int]
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
    """The tokens that words name. `all` and what cannot be drawn are ALL: the words stand on the page in any case."""
    found = TOKENS.search(words)
    if not found:
        return ALL
    period, first, last = (int(number) for number in found.groups())
    return Tokens(period, first, last) if 0 <= first < last <= period else ALL


def boxes_of(words: list[str]) -> list[tuple[str, int, int]]:
    """(axis, first, last) of each span named in a pair's boxes."""
    return [(axis, int(first), int(last)) for text in words for axis, first, last in BOX.findall(text)]


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of the drawing."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One matrix: its area, the axis from left to right, and the lines between layers and heads as a path."""

    area: Area
    axis: str
    grid: str


@dataclass(frozen=True, slots=True)
class Box:
    """What a rank holds or a pair moves: spans of layers and of axes, and which tokens."""

    layers: tuple[Span, ...]
    spans: tuple[tuple[str, int, int], ...]
    tokens: Tokens

    @classmethod
    def of_rank(cls, rank: Mapping[str, Any]) -> Box:
        """The box that a rank holds, from the facts about it."""
        spans = tuple((axis, span[0], span[1]) for axis, span in rank["axes"].items())
        first, last = rank["layers"]
        return cls(((first, last),), spans, tokens_of(rank["tokens"]))

    @classmethod
    def of_pair(cls, pair: Mapping[str, Any]) -> Box:
        """The box that a pair moves, from the facts about it."""
        layers = tuple((first, last) for first, last in pair["layers"])
        return cls(layers, tuple(boxes_of(pair["boxes"])), tokens_of(pair["tokens"]))

    def along(self, axis: str, extent: int) -> list[Span]:
        """Its spans of an axis: all of it when nothing is divided."""
        found = [(first, last) for name, first, last in self.spans if name == axis]
        return found if found or self.spans else [(0, extent)]


def colour_of(source: int) -> int:
    """The number of a source rank's colour."""
    return source % COLOURS


class Stripes:
    """The patterns that alternating tokens are filled with, each made once. All are of one scale."""

    def __init__(self, boxes: list[Box]) -> None:
        found = {box.tokens for box in boxes} - {ALL}
        finest = gcd(*(number for tokens in found for number in (tokens.period, tokens.first, tokens.last))) or 1
        longest = max((tokens.period for tokens in found), default=1)
        self._unit = min(STRIPE / finest, LONGEST / longest)
        self.patterns: dict[tuple[int, Tokens], tuple[float, float, float]] = {}

    def fill(self, colour: int, tokens: Tokens, share: Tokens) -> str:
        """The SVG fill. `share` divides one box between several sources that fill different states of it."""
        if tokens == ALL and share == ALL:
            return f"var(--c{colour})"
        shown, unit = (share, STRIPE) if tokens == ALL else (tokens, self._unit)
        sizes = (shown.period * unit, shown.first * unit, (shown.last - shown.first) * unit)
        self.patterns.setdefault((colour, shown), sizes)
        return f"url(#{pattern_name((colour, shown))})"


def pattern_name(key: tuple[int, Tokens]) -> str:
    """The id of a pattern."""
    colour, tokens = key
    return f"stripes-{colour}-{tokens.period}-{tokens.first}-{tokens.last}"


class CacheExtent:
    """The whole cache as every matrix shows it: layers from the first to the last, and the extent of each axis."""

    def __init__(self, ranks: list[Mapping[str, Any]]) -> None:
        """`ranks` are those of both sides."""
        extents: dict[str, int] = {}
        for rank in ranks:
            for axis, span in rank["axes"].items():
                extents[axis] = max(extents.get(axis, 1), span[1])
        self.extents = tuple(extents.items())[:MAX_PANELS] or (("", 1),)
        self.num_layers = max([1, *(rank["layers"][1] for rank in ranks)])

    def panels(self, area: Area) -> list[Panel]:
        """A panel for each axis, which share the area evenly."""
        width = (area.width - PANEL_GAP * (len(self.extents) - 1)) / len(self.extents)
        return [
            self._panel(Area(area.x + index * (width + PANEL_GAP), area.y, width, area.height), axis, extent)
            for index, (axis, extent) in enumerate(self.extents)
        ]

    def _panel(self, area: Area, axis: str, extent: int) -> Panel:
        columns = extent if extent <= 32 else 8
        xs = [area.x + area.width * at / columns for at in range(1, columns)]
        step = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if self.num_layers / step <= area.height / 9)
        ys = [area.y + area.height * at / self.num_layers for at in range(step, self.num_layers, step)]
        lines = [f"M{x:.1f} {area.y:.1f}v{area.height:.1f}" for x in xs]
        lines += [f"M{area.x:.1f} {y:.1f}h{area.width:.1f}" for y in ys]
        return Panel(area, axis, "".join(lines))

    def rectangles(self, panels: list[Panel], box: Box) -> list[Area]:
        """Where a box lies in the panels of a rank."""
        found = []
        for panel, (axis, extent) in zip(panels, self.extents, strict=True):
            area = panel.area
            for first, last in box.along(axis, extent):
                x, right = (area.x + area.width * min(at, extent) / extent for at in (first, last))
                for top, bottom in box.layers:
                    y, end = (area.y + area.height * at / self.num_layers for at in (top, bottom))
                    found.append(Area(x, y, right - x, end - y))
        return found
