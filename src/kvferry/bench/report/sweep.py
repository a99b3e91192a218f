"""The highest rate and the best goodput of several runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.bench.report.figures import Report
from kvferry.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Best:
    """`rate` is the highest at which at least `attainment` of the requests met the SLO, as at all lower ones, or 0.

    `goodput` is the most requests/s that met it at any rate, which was `goodput_rate`.
    """

    attainment: float
    rate: float
    goodput: float
    goodput_rate: float

    def as_json(self) -> dict[str, Any]:
        return {
            "wanted_attainment": self.attainment,
            "highest_rate_within_slo": self.rate,
            "best_goodput": self.goodput,
            "best_goodput_rate": self.goodput_rate,
        }


def best_of(reports: Sequence[Report], attainment: float) -> Best:
    """Of at least one report."""
    highest = 0.0
    for report in sorted(reports, key=lambda report: report.rate):
        if report.attainment < attainment:
            break
        highest = report.rate
    best = max(reports, key=lambda report: report.goodput)
    return Best(attainment, highest, best.goodput, best.rate)


def rates_named(text: str) -> tuple[float, ...]:
    """`1,2,4,8`, ascending, each once. Raises ConfigurationError."""
    try:
        rates = sorted({float(word) for word in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigurationError("invalid rates for --sweep", found=text, expected="requests/s such as 1,2,4,8")
    return tuple(rates)
