"""The figures of `kvferry bench serve` as tables on stdout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvferry.bench.report.figures import Report, best_of
from kvferry.bench.report.record import PERCENTILES, Summary
from kvferry.bench.report.slo import Slo

TIMES = (
    ("ttft", "time to first token"),
    ("itl", "inter-token latency"),
    ("tpot", "time per output token"),
    ("e2el", "end-to-end latency"),
    ("late", "sent late"),
)
FIGURES = ("mean", "median", *(f"p{part}" for part in PERCENTILES))


def show(reports: Sequence[Report], attainment: float) -> None:
    """Print one run in full, or a row for each and, with limits, the highest rate within them and the best goodput."""
    out = Console(highlight=False, markup=False, emoji=False)
    if len(reports) == 1:
        out.print(_times(reports[0]))
        _say(out, _words(reports[0]))
        return
    out.print(_rates(reports))
    if reports[0].slo.is_limited:
        best = best_of(reports, attainment)
        _say(
            out,
            f"highest rate at which {attainment:.0%} met the limits: {best.highest_rate_within_slo:g} requests/s; "
            f"best goodput: {best.best_goodput:.3g} requests/s, at {best.best_goodput_rate:g}",
        )


def _say(out: Console, words: str) -> None:
    """Print words, wrapped on a terminal only: whoever reads from a pipe looks for whole lines."""
    out.print(words, soft_wrap=not out.is_terminal, markup=False)


def _times(report: Report) -> Table:
    table = Table("ms", *FIGURES)
    for name, words in TIMES:
        of = report.times_s[name]
        table.add_row(words, *map(_ms, _figures(of)))
    return table


def _figures(of: Summary | None) -> tuple[float | None, ...]:
    return (None,) * len(FIGURES) if of is None else (of.mean, of.median, *of.percentiles)


def _ms(seconds: float | None) -> str:
    """A time that no answer has is none."""
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _words(report: Report) -> str:
    facts = report.as_json()
    lines = [
        f"{facts['completed']} of {facts['num_prompts']} answered in {report.duration_s:.1f} s: "
        f"{facts['request_throughput']:.3g} requests/s, {facts['output_throughput']:.4g} output tokens/s, "
        f"{facts['total_token_throughput']:.4g} tokens/s in all; at most {report.most_open} requests in flight",
        f"met {limits(report.slo)}: {report.attainment:.1%}; goodput {report.goodput:.3g} requests/s",
    ]
    lines += [f"{entry['count']} times: {entry['error']}" for entry in facts["common_errors"]]
    return "\n".join(lines if limits(report.slo) else [lines[0], *lines[2:]])


def limits(slo: Slo) -> str:
    """The limits in words, such as `ttft <= 5 s, mean itl <= 0.1 s`; empty without any."""
    named = (("ttft", slo.ttft_s), (f"{slo.itl_by} itl", slo.itl_s), ("e2el", slo.e2el_s))
    return ", ".join(f"{name} <= {limit_s:g} s" for name, limit_s in named if math.isfinite(limit_s))


def _rates(reports: Sequence[Report]) -> Table:
    """The table of several runs, a row each. With usual figures it fits a terminal, and none of them is cut."""
    has_limits = reports[0].slo.is_limited
    table = Table(title="times in ms", title_justify="left", show_edge=False, pad_edge=False)
    limited = ("within\nlimits", "goodput") if has_limits else ()
    for name in ("rate/s", "answered", *limited, "ttft\np50", "ttft\np99", "itl\nmean", "itl\np99"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        (_, ttft, *_, slow_ttft), (itl, *_, slow_itl) = (_figures(report.times_s[name]) for name in ("ttft", "itl"))
        table.add_row(
            f"{report.rate:g}",
            f"{len(report.answered)} of {len(report.records)}",
            *((f"{report.attainment:.1%}", f"{report.goodput:.3g}/s") if has_limits else ()),
            *map(_ms, (ttft, slow_ttft, itl, slow_itl)),
        )
    return table
