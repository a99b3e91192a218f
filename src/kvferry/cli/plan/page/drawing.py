"""Who sends what: ranks as cards at both sides, ribbons between them as wide as their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvferry.cli.plan.page.matrix import ALL, Area, Box, CacheExtent, Panel, Stripes, Tokens, colour_of, pattern_name
from kvferry.cli.units import format_bytes, format_span

WIDTH = 760.0
HEAD, FOOT = 58.0, 10.0
BAND = 24.0
GAP, STAGE_GAP = 8.0, 16.0
HEIGHTS = ((2, 150.0), (4, 116.0), (8, 82.0), (16, 62.0), (10**9, 50.0))
"""Up to so many ranks at one side, cards are so high."""
CARD, WORDS, PAD = 232.0, 124.0, 7.0
LINE, DIGIT, CHIP = 13.0, 8.0, 16.0
MIN_RIBBON = 1.2
# Free above and below the ribbons of the fullest card.
MARGIN = 7.0

Rank = Mapping[str, Any]
Pair = Mapping[str, Any]
Places = Mapping[str, Mapping[int, Area]]
"""The areas of the cards, by side and rank."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: a band beside its ranks."""

    area: Area
    label: str


@dataclass(frozen=True, slots=True)
class Region:
    """A filled part of a matrix; `path` has one rectangle per span, the label stands in the largest."""

    source: int
    target: int
    path: str
    fill: str
    label: str
    label_x: float
    label_y: float


@dataclass(frozen=True, slots=True)
class Card:
    """A rank of a `side`, source or target: its words, and small matrices of what it holds or receives."""

    side: str
    rank: int
    area: Area
    lines: tuple[str, ...]
    panels: tuple[Panel, ...]
    held: str
    regions: tuple[Region, ...]
    words: str


@dataclass(frozen=True, slots=True)
class Ribbon:
    """What a pair moves: a line from `start` to `end`, each (x, y), as wide as its bytes."""

    pair: Pair
    path: str
    width: float
    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that the template needs, in units of which the whole is 760 wide."""

    width: float
    height: float
    whole: CacheExtent
    cards: tuple[Card, ...]
    ribbons: tuple[Ribbon, ...]
    stages: tuple[Stage, ...]
    patterns: tuple[tuple[str, int, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class _Context:
    """What all cards are drawn with: the whole cache, the stripes, and the pairs of the plan."""

    whole: CacheExtent
    stripes: Stripes
    pairs: list[Pair]


def draw(facts: Mapping[str, Any]) -> Drawing:
    """The drawing of a plan."""
    sides = {side: list(facts[side]["ranks"]) for side in ("source", "target")}
    whole = CacheExtent(sides["source"] + sides["target"])
    boxes = [Box.of_rank(rank) for ranks in sides.values() for rank in ranks]
    stripes = Stripes(boxes + [Box.of_pair(pair) for pair in facts["pairs"]])
    places, height = _places(sides)
    context = _Context(whole, stripes, facts["pairs"])
    cards = [_card(side, rank, places[side][rank["rank"]], context) for side, ranks in sides.items() for rank in ranks]
    patterns = tuple((pattern_name(key), key[0], *sizes) for key, sizes in stripes.patterns.items())
    stages = tuple(stage for side, ranks in sides.items() for stage in _stages(side, ranks, places[side]))
    return Drawing(WIDTH, height, whole, tuple(cards), _ribbons(facts["pairs"], places), stages, patterns)


def _places(sides: Mapping[str, list[Rank]]) -> tuple[Places, float]:
    """The area of each card, and the height of the whole; the shorter side is spread evenly."""
    most = max(len(ranks) for ranks in sides.values())
    high = next(height for limit, height in HEIGHTS if most <= limit)
    gaps = {side: _gaps(ranks) for side, ranks in sides.items()}
    inner = max(len(ranks) * high + sum(gaps[side]) for side, ranks in sides.items())
    places: dict[str, dict[int, Area]] = {}
    for side, ranks in sides.items():
        slack = (inner - len(ranks) * high - sum(gaps[side])) / max(1, len(ranks))
        x = BAND if side == "source" else WIDTH - BAND - CARD
        y, places[side] = HEAD + slack / 2, {}
        for rank, gap in zip(ranks, [*gaps[side], 0.0], strict=False):
            places[side][rank["rank"]] = Area(x, y, CARD, high)
            y += high + gap + slack
    return places, HEAD + inner + FOOT


def _gaps(ranks: list[Rank]) -> list[float]:
    return [GAP if upper["stage"] == lower["stage"] else STAGE_GAP for upper, lower in pairwise(ranks)]


def _stages(side: str, ranks: list[Rank], places: Mapping[int, Area]) -> list[Stage]:
    """One band per stage; none when there is only one."""
    members: dict[int, list[Rank]] = defaultdict(list)
    for rank in ranks:
        members[rank["stage"]].append(rank)
    if len(members) < 2:
        return []
    bands = []
    for number, held in members.items():
        areas = [places[rank["rank"]] for rank in held]
        top, bottom = min(area.y for area in areas), max(area.y + area.height for area in areas)
        x = 2.0 if side == "source" else WIDTH - BAND + 4
        room = bottom - top
        label = f"stage {number} · {format_span('layer', *held[0]['layers'])}" if room > 130 else f"stage {number}"
        bands.append(Stage(Area(x, top, BAND - 6, room), label))
    return bands


def _card(side: str, rank: Rank, area: Area, context: _Context) -> Card:
    x = area.x + (WORDS if side == "source" else PAD)
    panels = context.whole.panels(Area(x, area.y + PAD, CARD - WORDS - PAD, area.height - 2 * PAD))
    number, box, lines = rank["rank"], Box.of_rank(rank), _lines(rank)
    held = context.whole.rectangles(panels, box)
    if side == "source":
        fill = context.stripes.fill(colour_of(number), box.tokens, ALL)
        regions = [_region((number, -1), held, fill, (0, 1))]
    else:
        regions = _arrivals(number, panels, context)
    shown = lines[: int((area.height - 6) / LINE)]
    return Card(
        side, number, area, shown, tuple(panels), _path(held), tuple(regions), words=f"{side} " + ", ".join(lines)
    )


def _arrivals(target: int, panels: list[Panel], context: _Context) -> list[Region]:
    """What fills a target rank. Sources that fill the same layers and spans share them in stripes."""
    sharing: dict[Any, list[tuple[int, Box]]] = defaultdict(list)
    for pair in context.pairs:
        if pair["target_rank"] == target:
            box = Box.of_pair(pair)
            sharing[box.layers, box.spans].append((pair["source_rank"], box))
    regions = []
    for sources in sharing.values():
        for index, (source, box) in enumerate(sources):
            fill = context.stripes.fill(colour_of(source), box.tokens, _share(sources, index))
            areas = context.whole.rectangles(panels, box)
            regions.append(_region((source, target), areas, fill, (index, len(sources))))
    return regions


def _share(sources: list[tuple[int, Box]], index: int) -> Tokens:
    """The stripe of one of several sources that fill different states of the same box and tokens; ALL for one alone."""
    alike = [at for at, (_, box) in enumerate(sources) if box == sources[index][1]]
    return ALL if len(alike) == 1 else Tokens(len(alike), alike.index(index), alike.index(index) + 1)


def _region(pair: tuple[int, int], areas: list[Area], fill: str, place: tuple[int, int]) -> Region:
    """`place` is (number, of how many) among those whose labels stand below one another in the same area."""
    largest = max(areas, key=lambda area: area.width * area.height, default=Area(0, 0, 0, 0))
    (index, count), label = place, str(pair[0])
    least_height = CHIP if fill.startswith("url") else DIGIT + 3
    is_roomy = largest.width >= DIGIT * len(label) + 3 and largest.height / count >= least_height
    x, y = largest.x + largest.width / 2, largest.y + largest.height * (index + 0.5) / count
    return Region(*pair, _path(areas), fill, label if is_roomy else "", x, y)


def _lines(rank: Rank) -> tuple[str, ...]:
    """The lines of a rank's card, the most telling first, as those that do not fit are left out."""
    spans = [format_span(axis, *span) for axis, span in rank["axes"].items()] or ["not divided"]
    tokens = [] if rank["tokens"] == "all" else [rank["tokens"]]
    layers = format_span("layer", *rank["layers"])
    return (f"rank {rank['rank']}", format_bytes(rank["bytes"]), *tokens, *spans, layers)


def _path(areas: list[Area]) -> str:
    return "".join(f"M{a.x:.1f} {a.y:.1f}h{a.width:.1f}v{a.height:.1f}h{-a.width:.1f}Z" for a in areas)


def _ribbons(pairs: list[Pair], places: Places) -> tuple[Ribbon, ...]:
    """A ribbon for each pair, all in one scale."""
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for pair in pairs:
        totals["source", pair["source_rank"]] += pair["bytes"]
        totals["target", pair["target_rank"]] += pair["bytes"]
    room = min((area.height for side in places.values() for area in side.values()), default=1.0) - 2 * MARGIN
    scale = room / max([1, *totals.values()])
    tops = {side: _tops(side, pairs, places[side], scale) for side in ("source", "target")}
    drawn = []
    for index, pair in enumerate(pairs):
        left, right = (places[side][pair[f"{side}_rank"]] for side in ("source", "target"))
        start = (left.x + left.width, tops["source"][index])
        drawn.append(_ribbon(pair, scale, start, (right.x, tops["target"][index])))
    return tuple(sorted(drawn, key=lambda ribbon: (ribbon.pair["source_rank"], ribbon.pair["target_rank"])))


def _tops(side: str, pairs: list[Pair], places: Mapping[int, Area], scale: float) -> dict[int, float]:
    """The upper edge of each pair's ribbon at one side, by the pair's index: stacked in the order of the other side."""
    mine, other = f"{side}_rank", "target_rank" if side == "source" else "source_rank"
    stacked: dict[int, list[int]] = defaultdict(list)
    for index, pair in enumerate(pairs):
        stacked[pair[mine]].append(index)
    tops = {}
    for rank, indices in stacked.items():
        area = places[rank]
        y = area.y + (area.height - scale * sum(pairs[index]["bytes"] for index in indices)) / 2
        for index in sorted(indices, key=lambda index: pairs[index][other]):
            tops[index] = y
            y += pairs[index]["bytes"] * scale
    return tops


def _ribbon(pair: Pair, scale: float, start: tuple[float, float], end: tuple[float, float]) -> Ribbon:
    """The ribbon of a pair, whose upper edge goes from `start` to `end`."""
    width = max(MIN_RIBBON, pair["bytes"] * scale)
    (x0, y0), (x1, y1) = ((x, y + width / 2) for x, y in (start, end))
    middle = (x0 + x1) / 2
    path = f"M{x0:.0f} {y0:.1f}C{middle:.0f} {y0:.1f} {middle:.0f} {y1:.1f} {x1:.0f} {y1:.1f}"
    return Ribbon(pair, path, width, (x0, y0), (x1, y1))
