"""What the page of a run draws: bars, points and curves over axes that end at round numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Below this nobody sees a bar.
TINY = 1e-9
NUM_BINS = 40


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `top`, with its name; `limit` is drawn as a line where it is not above."""

    name: str
    top: float
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one class, which is a colour of the page; joined when they are a curve."""

    style: str
    points: tuple[tuple[float, float], ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: the counts of equal bins from 0 to the end of the x axis, or series of points."""

    caption: str
    x: Axis
    y: Axis
    counts: tuple[int, ...] = ()
    series: tuple[Series, ...] = ()


def histogram(caption: str, values: Sequence[float], name: str, limit: float = math.inf) -> Chart:
    """Of values that are not negative; nothing is left out."""
    top = round_up(max(values, default=0.0))
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(int(value / top * NUM_BINS), NUM_BINS - 1)] += 1
    return Chart(caption, Axis(name, top, limit), Axis("count", round_up(max(counts))), counts=tuple(counts))


def round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 or 10 times a power of ten; 1 for next to nothing."""
    if not value > TINY:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next((step * scale for step in (1, 2, 4, 5, 8) if step * scale >= value), 10 * scale)
