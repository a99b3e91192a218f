"""A report as plain data: what `kvferry simulate fleet --json` prints, and its table and page show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvferry.bench.report.record import PERCENTILES, Summary
from kvferry.simulate.outcome import Figures
from kvferry.simulate.ratio import as_good
from kvferry.simulate.settings import Setting
from kvferry.simulate.simulation import GRACE_S
from kvferry.simulate.summary import Course, Report


def facts_of(report: Report) -> dict[str, Any]:
    """The whole run; times are in seconds."""
    result = report.result
    return {
        **_setting(result.setting),
        "figures": _figures(report.figures),
        "resources": [asdict(resource) for resource in report.resources],
        "incidents": [_course(course) for course in report.courses],
        "course": [_window(window) for window in report.windows],
        "samples": [asdict(sample) for sample in result.samples],
        **_effort([report]),
    }


def ratio_facts(best: Report, tried: Sequence[Report]) -> dict[str, Any]:
    """A row for each fleet that was tried. None of them is the best where none answers a request in time."""
    is_any_good = best.figures.num_good > 0
    equal = as_good(tried) if is_any_good else []
    return {
        **_setting(best.result.setting),
        "best": _row(best) if is_any_good else None,
        "as_good": [report.result.setting.fleet.num_prefill for report in equal],
        "tried": [_row(report) for report in tried],
        **_effort(tried),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    fleet, wires = setting.fleet, setting.wires
    return {
        "fleet": {**asdict(fleet), "racks": fleet.num_racks},
        "costs": asdict(setting.costs),
        "wires": asdict(wires),
        "slo": setting.slo.as_json(),
        "duration_s": setting.duration_s,
        "warm_up_s": setting.times.warm_up_s,
        "grace_s": GRACE_S,
    }


def _effort(reports: Sequence[Report]) -> dict[str, Any]:
    """What the simulation itself took."""
    cpu_s = sum(report.result.cpu_s for report in reports)
    choice_s = sum(report.result.choice_s for report in reports)
    return {
        "cpu_s": round(cpu_s, 3),
        "router_choices": sum(report.result.num_choices for report in reports),
        "router_choice_share": round(choice_s / cpu_s, 3) if cpu_s else 0.0,
    }


def _row(report: Report) -> dict[str, Any]:
    fleet = report.result.setting.fleet
    counts = {"num_prefill": fleet.num_prefill, "num_decode": fleet.num_decode}
    return {**counts, **_figures(report.figures), "scarcest": asdict(report.resources[0])}


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "begins_s": figures.begins_s,
        "ends_s": figures.ends_s,
        "requests": figures.num_requests,
        "good": figures.num_good,
        "good_share": figures.good_share,
        "goodput": figures.goodput,
        "failed": figures.num_failed,
        "unfinished": figures.num_unfinished,
        "retried": figures.num_retried,
        "decode_alone": figures.num_alone,
        "recomputed": figures.num_recomputed,
        **_times("ttft", figures.ttft_s),
        **_times("itl", figures.itl_s),
    }


def _times(name: str, of: Summary | None) -> dict[str, float | None]:
    """null where no answer has such a time, or it is that of a request that was unfinished at the end."""
    words = ("mean", "median", *(f"p{part}" for part in PERCENTILES))
    values = (None,) * len(words) if of is None else map(_finite, (of.mean, of.median, *of.percentiles))
    return {f"{word}_{name}_s": value for word, value in zip(words, values, strict=True)}


def _course(course: Course) -> dict[str, Any]:
    """null for what has no end, or was not seen, or, where it was not `compared`, cannot be told."""
    return {
        "words": course.words,
        "begins_s": course.begins_s,
        "ends_s": _finite(course.ends_s),
        "compared": course.recovery_s is not None,
        "recovery_s": None if course.recovery_s is None else _finite(course.recovery_s),
        "before": _figures(course.before),
        "during": _figures(course.during),
        "after": _figures(course.after),
    }


def _window(figures: Figures) -> dict[str, Any]:
    counts = ("requests", "good_share", "goodput", "failed", "unfinished")
    facts = _figures(figures)
    return {name: facts[name] for name in ("begins_s", "ends_s", *counts, "median_ttft_s", "p99_ttft_s")}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
