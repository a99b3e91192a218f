"""What the page draws: lines over the time of a run, scaled to a box. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvferry.bench.report.page import round_up

LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 56.0, 1130.0, 22.0, 170.0, 1184.0, 200.0
USED, PERCENT = "used, %", 100.0
NUM_STEPS = 4
NUM_SECONDS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its name, which is also shown, its colour's number, and its points as SVG has them, in parts where there
    are values."""

    name: str
    colour: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """The time of an incident, from `left` on for `width`; `number` is the one it has on the page."""

    number: int
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `limit` is the place of a line that values should not be above, None where none is drawn."""

    name: str
    lines: tuple[Line, ...]
    ticks: tuple[Tick, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The places of seconds and values in the box of a chart."""

    duration_s: float
    top: float

    def x(self, at_s: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(at_s / self.duration_s, 1.0)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * min(value / self.top, 1.0)


def charts_of(facts: Mapping[str, Any]) -> list[Chart]:
    """Goodput, waiting times, queues, and how busy everything was."""
    course, samples, duration_s = facts["course"], facts["samples"], facts["duration_s"]
    middles = [(window["begins_s"] + window["ends_s"]) / 2 for window in course]
    ends = [sample["at_s"] for sample in samples]
    arrived = [window["requests"] / (window["ends_s"] - window["begins_s"]) for window in course]
    drawn = _Drawn(duration_s)
    return [
        drawn.chart("requests/s", middles, {"arrived": arrived, "good": _of(course, "goodput")}),
        drawn.chart(
            "time to first token, s",
            middles,
            {"p99": _of(course, "p99_ttft_s"), "median": _of(course, "median_ttft_s")},
            facts["slo"].get("ttft_s"),
        ),
        drawn.chart(
            "waiting",
            ends,
            {
                "prompts at prefill engines": _of(samples, "num_waiting_prefill"),
                "requests at decode engines": _of(samples, "num_waiting_decode"),
            },
        ),
        drawn.chart(
            USED,
            ends,
            {
                "prefill engines compute": _percent(samples, "busy_prefill"),
                "decode engines compute": _percent(samples, "busy_decode"),
                "decode places": _percent(samples, "used_decode"),
                "busiest uplink": _percent(samples, "busy_uplink"),
            },
        ),
    ]


def bands_of(facts: Mapping[str, Any]) -> list[Band]:
    """The incidents; what has no end goes on to the end of the run."""
    duration_s = facts["duration_s"]
    scale, bands = Scale(duration_s, 1.0), []
    for number, incident in enumerate(facts["incidents"], 1):
        ends_s = duration_s if incident["ends_s"] is None else incident["ends_s"]
        left = scale.x(incident["begins_s"])
        bands.append(Band(number, left, scale.x(ends_s) - left))
    return bands


def seconds_of(facts: Mapping[str, Any]) -> list[Tick]:
    """The axis that all charts share."""
    duration_s = facts["duration_s"]
    steps = [duration_s * step / NUM_SECONDS for step in range(NUM_SECONDS + 1)]
    return [Tick(Scale(duration_s, 1.0).x(at_s), f"{at_s:.4g} s") for at_s in steps]


@dataclass(frozen=True, slots=True)
class _Drawn:
    duration_s: float

    def chart(
        self,
        name: str,
        times: Sequence[float],
        curves: Mapping[str, Sequence[float | None]],
        limit: float | None = None,
    ) -> Chart:
        most = max(value or 0.0 for values in curves.values() for value in values)
        scale = Scale(self.duration_s, PERCENT if name == USED else round_up(most))
        lines = [
            Line(word, colour, tuple(_parts(scale, times, values)))
            for colour, (word, values) in enumerate(curves.items())
        ]
        steps = [scale.top * step / NUM_STEPS for step in range(NUM_STEPS + 1)]
        ticks = tuple(Tick(scale.y(value), f"{value:.4g}") for value in steps)
        return Chart(name, tuple(lines), ticks, scale.y(limit) if limit is not None and limit < scale.top else None)


def _parts(scale: Scale, times: Sequence[float], values: Sequence[float | None]) -> Iterator[str]:
    """The points of each part of a curve between two gaps: times of which there is no value."""
    pairs = zip(times, values, strict=True)
    for is_gap, part in groupby(pairs, key=lambda pair: pair[1] is None):
        if not is_gap:
            points = [f"{scale.x(at):.1f},{scale.y(value):.1f}" for at, value in part if value is not None]
            # A line from a point to itself is a dot, a point alone is nothing.
            yield " ".join(points * 2 if len(points) == 1 else points)


def _of(rows: Sequence[Mapping[str, float | None]], name: str) -> list[float | None]:
    return [row[name] for row in rows]


def _percent(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [100 * row[name] for row in rows]
