"""Bars, dots and lines as SVG, with axes that have round numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Below this nobody sees a bar.
TINY = 1e-9
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 240, 60, 36, 14, 14


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `top`, with its name; `limit` is drawn as a line, infinity is not."""

    name: str
    top: float
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Dots:
    """Points of one class, which is a colour of the page; joined when they are a curve."""

    style: str
    points: tuple[tuple[float, float], ...]
    joined: bool = False


def histogram(values: Sequence[float], num_bins: int = 40) -> tuple[float, list[int]]:
    """The upper edge of the last bin, and the counts of equal bins from 0 to it; nothing is left out."""
    top = _round_up(max(values, default=0.0))
    counts = [0] * num_bins
    for value in values:
        counts[min(int(value / top * num_bins), num_bins - 1)] += 1
    return top, counts


def bars(values: Sequence[float], name: str, limit: float = math.inf) -> str:
    """A histogram of values that are not negative."""
    top, counts = histogram(values)
    x, y = Axis(name, top, limit), Axis("count", _round_up(max(counts)))
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    shapes = [
        f'<rect class="bar" x="{LEFT + i * width:.1f}" y="{_y(y, count):.1f}" width="{max(width - 1, 0.5):.1f}"'
        f' height="{HEIGHT - BOTTOM - _y(y, count):.1f}"/>'
        for i, count in enumerate(counts)
        if count
    ]
    return _svg(x, y, shapes)


def dots(series: Sequence[Dots], x: Axis, y: Axis) -> str:
    """Points over two axes, whose tops are moved up to round numbers."""
    x, y = Axis(x.name, _round_up(x.top), x.limit), Axis(y.name, _round_up(y.top), y.limit)
    shapes = []
    for one in series:
        places = [(_x(x, across), _y(y, up)) for across, up in one.points]
        if one.joined:
            path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
            shapes.append(f'<polyline class="{one.style}" points="{path}"/>')
        shapes += [f'<circle class="{one.style}" cx="{across:.1f}" cy="{up:.1f}" r="2.5"/>' for across, up in places]
    return _svg(x, y, shapes)


def _svg(x: Axis, y: Axis, shapes: list[str]) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for part in range(5):
        across, up = _x(x, x.top * part / 4), _y(y, y.top * part / 4)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{y.top * part / 4:.6g}</text>')
        parts.append(f'<text x="{across:.1f}" y="{bottom + 15}" text-anchor="middle">{x.top * part / 4:.6g}</text>')
    parts += shapes
    if x.limit <= x.top:
        across = _x(x, x.limit)
        parts.append(f'<line class="limit" x1="{across:.1f}" x2="{across:.1f}" y1="{TOP}" y2="{bottom}"/>')
    if y.limit <= y.top:
        up = _y(y, y.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{escape(x.name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 3}">{escape(y.name)}</text></svg>')
    return "".join(parts)


def _x(axis: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / axis.top


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / axis.top


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 or 10 times a power of ten; 1 for next to nothing."""
    if not value > TINY:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next((step * scale for step in (1, 2, 4, 5, 8) if step * scale >= value), 10 * scale)
