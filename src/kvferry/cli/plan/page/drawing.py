"""Who sends what: ranks as cards at both sides, ribbons between them as wide as their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvferry.cli.plan.page.cards import CARD, Card, DrawingContext, card
from kvferry.cli.plan.page.matrix import Area, Box, CacheExtent, Stripes, pattern_name
from kvferry.cli.plan.page.ribbons import Ribbon, ribbons
from kvferry.cli.units import format_span

WIDTH = 760.0
HEAD, FOOT = 58.0, 10.0
BAND = 24.0
GAP, STAGE_GAP = 8.0, 16.0
HEIGHTS = ((2, 150.0), (4, 116.0), (8, 82.0), (16, 62.0), (10**9, 50.0))
"""Up to so many ranks at one side, cards are so high."""


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
    whole: CacheExtent
    cards: tuple[Card, ...]
    ribbons: tuple[Ribbon, ...]
    stages: tuple[Stage, ...]
    patterns: tuple[tuple[str, int, float, float, float], ...]


def draw(facts: Mapping[str, Any]) -> Drawing:
    """The drawing of a plan."""
    sides = {side: list(facts[side]["ranks"]) for side in ("source", "target")}
    whole = CacheExtent.of(sides["source"] + sides["target"])
    boxes = [Box.of_rank(rank) for ranks in sides.values() for rank in ranks]
    stripes = Stripes(boxes + [Box.of_pair(pair) for pair in facts["pairs"]])
    places, height = _places(sides)
    cards = [
        card(side, rank, places[side][rank["rank"]], DrawingContext(whole, stripes, facts["pairs"]))
        for side, ranks in sides.items()
        for rank in ranks
    ]
    patterns = tuple((pattern_name(key), key[0], *sizes) for key, sizes in stripes.patterns.items())
    stages = tuple(stage for side, ranks in sides.items() for stage in _stages(side, ranks, places[side]))
    return Drawing(WIDTH, height, whole, tuple(cards), ribbons(facts["pairs"], places), stages, patterns)


def _places(sides: Mapping[str, list[Mapping[str, Any]]]) -> tuple[dict[str, dict[int, Area]], float]:
    """The area of each card by rank, and the height of the whole; the shorter side is spread evenly."""
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


def _gaps(ranks: list[Mapping[str, Any]]) -> list[float]:
    return [GAP if upper["stage"] == lower["stage"] else STAGE_GAP for upper, lower in pairwise(ranks)]


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
        label = f"stage {number} · {format_span('layer', *held[0]['layers'])}" if room > 130 else f"stage {number}"
        bands.append(Stage(Area(x, top, BAND - 6, room), label))
    return bands
