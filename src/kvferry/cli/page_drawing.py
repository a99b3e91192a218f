"""Who sends what: ranks as cards at both sides, ribbons between them as wide as their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvferry.cli.page_matrix import COLOURS, Area, Box, Panel, Region, Stripes, Whole, pattern_name
from kvferry.cli.page_words import ALL, Tokens, axis_words, bytes_words

__all__ = ["Card", "Drawing", "Ribbon", "draw"]

WIDTH = 760.0
HEAD, FOOT = 58.0, 10.0
BAND, CARD, WORDS, PAD = 24.0, 232.0, 124.0, 7.0
GAP, STAGE_GAP = 8.0, 16.0
LINE = 13.0
ROOMY_RIBBON = 12.0
MIN_RIBBON = 1.2
HEIGHTS = ((2, 150.0), (4, 116.0), (8, 82.0), (16, 62.0), (10**9, 50.0))
"""Up to so many ranks at one side, cards are so high."""


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
class Label:
    """A few words at a place."""

    text: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Ribbon:
    """What one source rank sends to one target rank; its labels at both ends are empty where there is no room."""

    source: int
    target: int
    colour: int
    path: str
    left: Label
    right: Label
    words: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: a band beside its ranks."""

    area: Area
    label: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that the template needs, in units of which the whole is 760 wide."""

    width: float
    height: float
    whole: Whole
    cards: tuple[Card, ...]
    ribbons: tuple[Ribbon, ...]
    stages: tuple[Stage, ...]
    patterns: tuple[tuple[str, int, float, float, float], ...]


def draw(facts: Mapping[str, Any]) -> Drawing:
    """The drawing of a plan."""
    sides = {side: list(facts[side]["ranks"]) for side in ("source", "target")}
    whole = Whole.of(sides["source"] + sides["target"])
    boxes = [Box.of_rank(rank) for ranks in sides.values() for rank in ranks]
    stripes = Stripes(boxes + [Box.of_pair(pair) for pair in facts["pairs"]])
    places, height = _places(sides)
    cards = [
        _card(side, rank, places[side][rank["rank"]], _Pen(whole, stripes, facts["pairs"]))
        for side, ranks in sides.items()
        for rank in ranks
    ]
    patterns = tuple((pattern_name(key), key[0], *sizes) for key, sizes in stripes.patterns.items())
    stages = tuple(stage for side, ranks in sides.items() for stage in _stages(side, ranks, places[side]))
    return Drawing(WIDTH, height, whole, tuple(cards), _ribbons(facts["pairs"], places), stages, patterns)


@dataclass(frozen=True, slots=True)
class _Pen:
    whole: Whole
    stripes: Stripes
    pairs: list[Mapping[str, Any]]


def _places(sides: Mapping[str, list[Mapping[str, Any]]]) -> tuple[dict[str, dict[int, Area]], float]:
    """The area of each card by rank, and the height of the whole; the shorter side is spread evenly."""
    most = max(len(ranks) for ranks in sides.values())
    card = next(height for limit, height in HEIGHTS if most <= limit)
    gaps = {side: _gaps(ranks) for side, ranks in sides.items()}
    inner = max(len(ranks) * card + sum(gaps[side]) for side, ranks in sides.items())
    places: dict[str, dict[int, Area]] = {}
    for side, ranks in sides.items():
        slack = (inner - len(ranks) * card - sum(gaps[side])) / max(1, len(ranks))
        x = BAND if side == "source" else WIDTH - BAND - CARD
        y, places[side] = HEAD + slack / 2, {}
        for rank, gap in zip(ranks, [*gaps[side], 0.0], strict=False):
            places[side][rank["rank"]] = Area(x, y, CARD, card)
            y += card + gap + slack
    return places, HEAD + inner + FOOT


def _gaps(ranks: list[Mapping[str, Any]]) -> list[float]:
    return [GAP if upper["stage"] == lower["stage"] else STAGE_GAP for upper, lower in pairwise(ranks)]


def _card(side: str, rank: Mapping[str, Any], area: Area, pen: _Pen) -> Card:
    matrix = Area(
        area.x + (WORDS if side == "source" else PAD), area.y + PAD, CARD - WORDS - PAD, area.height - 2 * PAD
    )
    panels, number, box = pen.whole.panels(matrix), rank["rank"], Box.of_rank(rank)
    if side == "source":
        fill = pen.stripes.fill(_colour(number), box.tokens, ALL)
        regions = [_region((number, -1), pen.whole.rectangles(panels, box), fill, (0, 1))]
    else:
        regions = _arrivals(number, panels, pen)
    lines = _lines(rank, pen.whole)
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


def _arrivals(target: int, panels: list[Panel], pen: _Pen) -> list[Region]:
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
    roomy = largest.width >= 16 and largest.height / count >= 14
    return Region(
        source=pair[0],
        target=pair[1],
        colour=_colour(pair[0]),
        path=_path(areas),
        fill=fill,
        label=str(pair[0]) if roomy else "",
        label_x=largest.x + largest.width / 2,
        label_y=largest.y + largest.height * (index + 0.5) / count,
    )


def _lines(rank: Mapping[str, Any], whole: Whole) -> tuple[str, ...]:
    """The most telling first: what does not fit is left out."""
    spans = [axis_words(axis, *span) for axis, span in rank["axes"].items()] or ["not divided"]
    tokens = [] if rank["tokens"] == "all" else [rank["tokens"]]
    layers = axis_words("layer", *rank["layers"])
    return (f"rank {rank['rank']}", bytes_words(rank["bytes"]), *tokens, *spans, layers)


def _stages(side: str, ranks: list[Mapping[str, Any]], places: Mapping[int, Area]) -> list[Stage]:
    """One band per stage; none when there is only one."""
    members: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
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
        label = f"stage {number} · {axis_words('layer', *held[0]['layers'])}" if room > 130 else f"stage {number}"
        bands.append(Stage(Area(x, top, BAND - 6, room), label))
    return bands


def _ribbons(pairs: list[Mapping[str, Any]], places: Mapping[str, Mapping[int, Area]]) -> tuple[Ribbon, ...]:
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for pair in pairs:
        totals["source", pair["source_rank"]] += pair["bytes"]
        totals["target", pair["target_rank"]] += pair["bytes"]
    room = min((area.height for side in places.values() for area in side.values()), default=1.0) - 2 * PAD
    scale = room / max([1, *totals.values()])
    ends = {side: _ends(side, pairs, places, scale) for side in ("source", "target")}
    ribbons = [_ribbon(pair, scale, ends["source"][index], ends["target"][index]) for index, pair in enumerate(pairs)]
    return tuple(sorted(ribbons, key=lambda ribbon: (ribbon.source, ribbon.target)))


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


def _ribbon(pair: Mapping[str, Any], scale: float, left: float, right: float) -> Ribbon:
    x0, x1 = BAND + CARD, WIDTH - BAND - CARD
    middle, width = (x0 + x1) / 2, max(MIN_RIBBON, pair["bytes"] * scale)
    path = (
        f"M{x0:.0f} {left:.1f}C{middle:.0f} {left:.1f} {middle:.0f} {right:.1f} {x1:.0f} {right:.1f}v{width:.1f}"
        f"C{middle:.0f} {right + width:.1f} {middle:.0f} {left + width:.1f} {x0:.0f} {left + width:.1f}Z"
    )
    source, target = pair["source_rank"], pair["target_rank"]
    size, strategy = bytes_words(pair["bytes"]), pair["strategy"]
    words = f"source rank {source} to target rank {target}: {size}, {strategy}"
    roomy = width >= ROOMY_RIBBON
    # At its ends a ribbon is level and hidden by no other.
    ends = [
        Label(text if roomy else "", x, y + width / 2)
        for text, x, y in ((size, x0 + 8, left), (strategy, x1 - 8, right))
    ]
    return Ribbon(source, target, _colour(source), path, ends[0], ends[1], words)


def _path(areas: list[Area]) -> str:
    return "".join(f"M{a.x:.1f} {a.y:.1f}h{a.width:.1f}v{a.height:.1f}h{-a.width:.1f}Z" for a in areas)


def _colour(source: int) -> int:
    return source % COLOURS
