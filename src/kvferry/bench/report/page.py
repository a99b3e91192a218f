"""The runs as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kvferry.bench.report.drawing import Axis, Dots, bars, dots
from kvferry.bench.report.figures import Report

STYLE = """
body{font:14px/1.4 system-ui,sans-serif;max-width:1340px;margin:24px auto;padding:0 16px;color:#1b2733;background:#fff}
.row{display:flex;flex-wrap:wrap;gap:16px}figure{margin:0;flex:1 1 560px}figcaption{font-weight:600;margin:8px 0}
svg{width:100%;height:auto}text{font-size:11px;fill:#5a6773}.grid{stroke:#e3e8ec}.bar{fill:#3b7dd8}
.limit{stroke:#c0392b;stroke-dasharray:5 4}.good{fill:#2e8b57;stroke:none}.bad{fill:#c0392b;stroke:none}
.curve{fill:none;stroke:#3b7dd8;stroke-width:1.5}.asked{fill:none;stroke:#aab4bd}
@media(prefers-color-scheme:dark){body{color:#dde5ec;background:#12181e}text{fill:#97a5b2}.grid{stroke:#26313b}}
"""
EXPLAINED = "Green met the limits, red did not; dashed lines are the limits."
# Without --slo nothing was asked for, so nothing is said of it.
WITHOUT_LIMITS = "Red requests failed."


def page(title: str, reports: Sequence[Report]) -> str:
    """Distributions and a timeline for every run; for several, first the curve of goodput over the rate."""
    parts = [_curve(reports)] if len(reports) > 1 else []
    parts += [_section(report) for report in reports]
    explained = EXPLAINED if any(report.slo.is_limited for report in reports) else WITHOUT_LIMITS
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"{head}<h1>{escape(title)}</h1><p>{explained}</p>{''.join(parts)}</html>\n"


def _curve(reports: Sequence[Report]) -> str:
    got = tuple((report.rate, report.goodput) for report in reports)
    top = max(report.rate for report in reports)
    series = [Dots("asked", ((0.0, 0.0), (top, top)), joined=True), Dots("curve", got, joined=True)]
    is_limited = reports[0].slo.is_limited
    name = "requests/s within the limits" if is_limited else "requests/s answered"
    drawn = dots(series, Axis("requests/s sent", top), Axis(name, top))
    return _row((_figure("Goodput over the rate" if is_limited else "Throughput over the rate", drawn),))


def _section(report: Report) -> str:
    answered = report.answered
    ttfts_ms = [record.ttft_s * 1000 for record in answered]
    gaps_ms = [gap_s * 1000 for record in answered for gap_s in record.gaps_s]
    rate = f"{report.rate:g} requests/s" if math.isfinite(report.rate) else "all at once, or one after another"
    words = f"{len(answered)} of {len(report.records)} answered"
    if report.slo.is_limited:
        words += f", {report.attainment:.1%} within the limits; {report.goodput:.3g} requests/s of goodput"
    figures = (
        _figure("Time to first token", bars(ttfts_ms, "ms", report.slo.ttft_s * 1000)),
        _figure("Inter-token latency", bars(gaps_ms, "ms", report.slo.itl_s * 1000)),
        _figure("Time to first token, by arrival", _timeline(report)),
    )
    return f"<h2>{rate}</h2><p>{words}</p>{_row(figures)}"


def _timeline(report: Report) -> str:
    """A failed request is a red dot at 0."""
    good: list[tuple[float, float]] = []
    bad: list[tuple[float, float]] = []
    for record in report.records:
        (good if report.slo.met_by(record) else bad).append((record.sent_s, record.ttft_s))
    last_s = max((record.sent_s for record in report.records), default=0.0)
    slowest_s = max((record.ttft_s for record in report.records), default=0.0)
    series = [Dots("good" if report.slo.is_limited else "bar", tuple(good)), Dots("bad", tuple(bad))]
    return dots(series, Axis("s since the start", last_s), Axis("s", slowest_s, report.slo.ttft_s))


def _figure(caption: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawn}</figure>"


def _row(figures: Sequence[str]) -> str:
    return f'<div class="row">{"".join(figures)}</div>'
