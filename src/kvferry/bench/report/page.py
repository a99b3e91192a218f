"""The runs as one HTML page that needs nothing else. Pure: Python makes numbers, the template makes tags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from kvferry.bench.report.figures import Report

# Below this nobody sees a bar.
TINY = 1e-9
NUM_BINS = 40
EXPLAINED = "Green met the limits, red did not; dashed lines are the limits."
# Without --slo nothing was asked for, so nothing is said of it.
WITHOUT_LIMITS = "Red requests failed."


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0 to `top`, with its name. `limit` is drawn as a line where it is not above `top`."""

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
    """A histogram of values that are not negative. None of them is left out."""
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


@dataclass(frozen=True, slots=True)
class Section:
    """One run."""

    title: str
    words: str
    charts: tuple[Chart, ...]


def page(title: str, reports: Sequence[Report]) -> str:
    """Distributions and a timeline for every run; for several, first the curve of goodput over the rate."""
    explained = EXPLAINED if any(report.slo.is_limited for report in reports) else WITHOUT_LIMITS
    curve = _curve(reports) if len(reports) > 1 else None
    return render(title, explained, [_section(report) for report in reports], curve)


def render(title: str, explained: str, sections: Sequence[Section], curve: Chart | None = None) -> str:
    """The HTML of a page: one curve for all, if there is one, and the charts of each section."""
    return _template().render(title=title, explained=explained, curve=curve, sections=sections)


@cache
def _template() -> Template:
    # The names of models and servers come from users: nothing reaches the page unescaped.
    loader = PackageLoader("kvferry.bench.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html.j2")


def _curve(reports: Sequence[Report]) -> Chart:
    got = tuple((report.rate, report.goodput) for report in reports)
    end = max(report.rate for report in reports)
    top = round_up(end)
    series = (Series("asked", ((0.0, 0.0), (end, end)), joined=True), Series("curve", got, joined=True))
    is_limited = reports[0].slo.is_limited
    name = "requests/s within the limits" if is_limited else "requests/s answered"
    caption = "Goodput over the rate" if is_limited else "Throughput over the rate"
    return Chart(caption, Axis("requests/s sent", top), Axis(name, top), series=series)


def _section(report: Report) -> Section:
    answered = report.answered
    ttfts_ms = [record.ttft_s * 1000 for record in answered]
    gaps_ms = [gap_s * 1000 for record in answered for gap_s in record.gaps_s]
    words = f"{len(answered)} of {len(report.records)} answered"
    if report.slo.is_limited:
        words += f", {report.attainment:.1%} within the limits; {report.goodput:.3g} requests/s of goodput"
    return Section(
        title=f"{report.rate:g} requests/s" if math.isfinite(report.rate) else "all at once, or one after another",
        words=words,
        charts=(
            histogram("Time to first token", ttfts_ms, "ms", report.slo.ttft_s * 1000),
            histogram("Inter-token latency", gaps_ms, "ms", report.slo.itl_s * 1000),
            _timeline(report),
        ),
    )


def _timeline(report: Report) -> Chart:
    """The chart of times to first token by arrival. A failed request is a red dot at 0."""
    good: list[tuple[float, float]] = []
    bad: list[tuple[float, float]] = []
    for record in report.records:
        (good if report.slo.met_by(record) else bad).append((record.sent_s, record.ttft_s))
    last_s = round_up(max((record.sent_s for record in report.records), default=0.0))
    slowest_s = round_up(max((record.ttft_s for record in report.records), default=0.0))
    series = (Series("good" if report.slo.is_limited else "bar", tuple(good)), Series("bad", tuple(bad)))
    x, y = Axis("s since the start", last_s), Axis("s", slowest_s, report.slo.ttft_s)
    return Chart("Time to first token, by arrival", x, y, series=series)
