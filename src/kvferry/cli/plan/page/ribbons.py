"""Ribbons between the cards of two ranks, as wide as the bytes that go from one to the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cli.plan.page.matrix import COLOURS, Area
from kvferry.cli.units import format_bytes

MIN_RIBBON = 1.2
ROOMY_RIBBON = 12.0
# Free above and below the ribbons of the fullest card.
MARGIN = 7.0
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Label:
    """A few words at a place."""

    text: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Ribbon:
    """What one source rank sends to one target rank; a line, labelled at both ends where there is room."""

    source: int
    target: int
    colour: int
    path: str
    width: float
    left: Label
    right: Label
    words: str


def ribbons(pairs: list[Mapping[str, Any]], places: Mapping[str, Mapping[int, Area]]) -> tuple[Ribbon, ...]:
    """One per pair, in one scale; `places` are the areas of the cards by side and rank."""
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for pair in pairs:
        totals["source", pair["source_rank"]] += pair["bytes"]
        totals["target", pair["target_rank"]] += pair["bytes"]
    room = min((area.height for side in places.values() for area in side.values()), default=1.0) - 2 * MARGIN
    scale = room / max([1, *totals.values()])
    ends = {side: _ends(side, pairs, places, scale) for side in ("source", "target")}
    drawn = []
    for index, pair in enumerate(pairs):
        left, right = (places[side][pair[f"{side}_rank"]] for side in ("source", "target"))
        start = (left.x + left.width, ends["source"][index])
        drawn.append(_ribbon(pair, scale, start, (right.x, ends["target"][index])))
    return tuple(sorted(drawn, key=lambda ribbon: (ribbon.source, ribbon.target)))


def _ends(
    side: str, pairs: list[Mapping[str, Any]], places: Mapping[str, Mapping[int, Area]], scale: float
) -> dict[int, float]:
    """The upper edge of each pair's ribbon at one side, by the pair's index: stacked in the order of the other side."""
    mine, other = f"{side}_rank", "target_rank" if side == "source" else "source_rank"
    stacked: dict[int, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        stacked[pair[mine]].append(index)
    ends = {}
    for rank, indices in stacked.items():
        area = places[side][rank]
        y = area.y + (area.height - scale * sum(pairs[index]["bytes"] for index in indices)) / 2
        for index in sorted(indices, key=lambda index: pairs[index][other]):
            ends[index] = y
            y += pairs[index]["bytes"] * scale
    return ends


def _ribbon(pair: Mapping[str, Any], scale: float, start: Point, end: Point) -> Ribbon:
    (x0, left), (x1, right) = start, end
    middle, width = (x0 + x1) / 2, max(MIN_RIBBON, pair["bytes"] * scale)
    left, right = left + width / 2, right + width / 2
    path = f"M{x0:.0f} {left:.1f}C{middle:.0f} {left:.1f} {middle:.0f} {right:.1f} {x1:.0f} {right:.1f}"
    source, target = pair["source_rank"], pair["target_rank"]
    size, strategy = format_bytes(pair["bytes"]), pair["strategy"]
    words = f"source rank {source} to target rank {target}: {size}, {strategy}"
    roomy = width >= ROOMY_RIBBON
    # At its ends a ribbon is level and hidden by no other.
    ends = [Label(text if roomy else "", x, y) for text, x, y in ((size, x0 + 8, left), (strategy, x1 - 8, right))]
    return Ribbon(source, target, source % COLOURS, path, width, ends[0], ends[1], words)
