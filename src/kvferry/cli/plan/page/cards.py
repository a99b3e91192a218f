"""One rank as a card: its words, and what it holds or receives in small matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cli.plan.page.matrix import COLOURS, Area, Box, CacheExtent, Panel, Region, Stripes
from kvferry.cli.plan.page.spans import ALL, Tokens
from kvferry.cli.units import format_bytes, format_span

CARD, WORDS, PAD = 232.0, 124.0, 7.0
LINE, DIGIT, CHIP = 13.0, 8.0, 16.0


@dataclass(frozen=True, slots=True)
class Card:
    """A rank; `side` is source or target. Lines of text start or end at `text_x`."""

    side: str
    rank: int
    area: Area
    lines: tuple[str, ...]
    text_x: float
    panels: tuple[Panel, ...]
    held: str
    regions: tuple[Region, ...]
    words: str


@dataclass(frozen=True, slots=True)
class DrawingContext:
    """What all cards are drawn with: the whole cache, the stripes, and the pairs of the plan."""

    whole: CacheExtent
    stripes: Stripes
    pairs: list[Mapping[str, Any]]


def card(side: str, rank: Mapping[str, Any], area: Area, pen: DrawingContext) -> Card:
    """The card of one rank of a side, in its area."""
    matrix = Area(
        area.x + (WORDS if side == "source" else PAD), area.y + PAD, CARD - WORDS - PAD, area.height - 2 * PAD
    )
    panels, number, box = pen.whole.panels(matrix), rank["rank"], Box.of_rank(rank)
    if side == "source":
        fill = pen.stripes.fill(_colour(number), box.tokens, ALL)
        regions = [_region((number, -1), pen.whole.rectangles(panels, box), fill, (0, 1))]
    else:
        regions = _arrivals(number, panels, pen)
    lines = _lines(rank)
    return Card(
        side=side,
        rank=number,
        area=area,
        lines=lines[: int((area.height - 6) / LINE)],
        text_x=area.x + PAD + 2 if side == "source" else area.x + CARD - PAD - 2,
        panels=tuple(panels),
        held=_path(pen.whole.rectangles(panels, box)),
        regions=tuple(regions),
        words=f"{side} " + ", ".join(lines),
    )


def _arrivals(target: int, panels: list[Panel], pen: DrawingContext) -> list[Region]:
    """What fills a target rank. Sources that fill the same layers and spans share them in stripes."""
    sharing: dict[Any, list[tuple[int, Box]]] = defaultdict(list)
    for pair in pen.pairs:
        if pair["target_rank"] == target:
            box = Box.of_pair(pair)
            sharing[box.layers, box.spans].append((pair["source_rank"], box))
    regions = []
    for sources in sharing.values():
        for index, (source, box) in enumerate(sources):
            fill = pen.stripes.fill(_colour(source), box.tokens, _share(sources, index))
            areas = pen.whole.rectangles(panels, box)
            regions.append(_region((source, target), areas, fill, (index, len(sources))))
    return regions


def _share(sources: list[tuple[int, Box]], index: int) -> Tokens:
    """Of one box and the same tokens, several sources fill different states: each has its stripe."""
    alike = [at for at, (_, box) in enumerate(sources) if box == sources[index][1]]
    return ALL if len(alike) == 1 else Tokens(len(alike), alike.index(index), alike.index(index) + 1)


def _region(pair: tuple[int, int], areas: list[Area], fill: str, place: tuple[int, int]) -> Region:
    """`place` is (number, of how many) among those whose labels stand below one another in the same area."""
    largest = max(areas, key=lambda area: area.width * area.height, default=Area(0, 0, 0, 0))
    index, count = place
    label = str(pair[0])
    roomy = largest.width >= DIGIT * len(label) + 3 and largest.height / count >= (
        CHIP if fill.startswith("url") else DIGIT + 3
    )
    return Region(
        source=pair[0],
        target=pair[1],
        colour=_colour(pair[0]),
        path=_path(areas),
        fill=fill,
        label=label if roomy else "",
        label_x=largest.x + largest.width / 2,
        label_y=largest.y + largest.height * (index + 0.5) / count,
    )


def _lines(rank: Mapping[str, Any]) -> tuple[str, ...]:
    """The most telling first: what does not fit is left out."""
    spans = [format_span(axis, *span) for axis, span in rank["axes"].items()] or ["not divided"]
    tokens = [] if rank["tokens"] == "all" else [rank["tokens"]]
    layers = format_span("layer", *rank["layers"])
    return (f"rank {rank['rank']}", format_bytes(rank["bytes"]), *tokens, *spans, layers)


def _path(areas: list[Area]) -> str:
    return "".join(f"M{a.x:.1f} {a.y:.1f}h{a.width:.1f}v{a.height:.1f}h{-a.width:.1f}Z" for a in areas)


def _colour(source: int) -> int:
    return source % COLOURS
