"""Figures of one run, as `vllm bench serve --save-result` names them, and the best of several runs. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvferry.bench.report.record import PERCENTILES, Record, Summary, summary
from kvferry.bench.report.slo import Slo

MAX_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """One run of `duration_s` seconds, from the start to the last answer. `rate` is what was asked for, infinite for
    all at once; `most_open` how many requests were open at the same time; `num_good` how many met the SLO. In `times_s`
    is None for a time that no answer has.
    """

    records: tuple[Record, ...]
    duration_s: float
    rate: float
    most_open: int
    slo: Slo
    times_s: dict[str, Summary | None]

    @property
    def answered(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if not record.error)

    @property
    def num_good(self) -> int:
        return sum(self.slo.met_by(record) for record in self.records)

    @property
    def attainment(self) -> float:
        """The part of all requests, failed ones included, that met the SLO."""
        return self.num_good / len(self.records) if self.records else 0.0

    @property
    def goodput(self) -> float:
        """Requests/s that met the SLO."""
        return self.num_good / self.duration_s

    def as_json(self, with_requests: bool = False) -> dict[str, Any]:
        """Names of vLLM first, then ours; with every request's times, in vLLM's lists, when that is wanted.

        Without limits there is no goodput: null. So are the statistics of a time that no answer has, where vLLM has 0.
        """
        return _of_vllm(self) | _of_times(self.times_s) | _ours(self) | (_lists(self) if with_requests else {})


def report_of(records: Sequence[Record], duration_s: float, rate: float, most_open: int, slo: Slo) -> Report:
    """The report of one run. `duration_s` is above 0."""
    answered = [record for record in records if not record.error]
    times_s = {
        "ttft": summary([record.ttft_s for record in answered]),
        "tpot": summary([record.tpot_s for record in answered if record.output_tokens > 1]),
        "itl": summary([gap_s for record in answered for gap_s in record.gaps_s]),
        "e2el": summary([record.e2el_s for record in answered]),
        "late": summary([record.late_s for record in records]),
    }
    return Report(tuple(records), duration_s, rate, most_open, slo, times_s)


def _of_vllm(report: Report) -> dict[str, Any]:
    answered, duration_s = report.answered, report.duration_s
    num_in, num_out = sum(r.prompt_tokens for r in answered), sum(r.output_tokens for r in answered)
    return {
        "num_prompts": len(report.records),
        "request_rate": report.rate if math.isfinite(report.rate) else "inf",
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(report.records) - len(answered),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(answered) / duration_s,
        "request_goodput": report.goodput if report.slo.is_limited else None,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_concurrent_requests": report.most_open,
    }


def _of_times(times_s: dict[str, Summary | None]) -> dict[str, float | None]:
    words = ("mean", "median", "std", *(f"p{part}" for part in PERCENTILES))
    facts: dict[str, float | None] = {}
    for name, of in times_s.items():
        values = (None,) * len(words) if of is None else (of.mean, of.median, of.std, *of.percentiles)
        named = zip(words, values, strict=True)
        facts |= {f"{word}_{name}_ms": None if value is None else value * 1000 for word, value in named}
    return facts


def _ours(report: Report) -> dict[str, Any]:
    common = Counter(record.error for record in report.records if record.error).most_common(MAX_ERRORS)
    return {
        "slo": report.slo.as_json(),
        "slo_attainment": report.attainment if report.slo.is_limited else None,
        "max_late_ms": max((record.late_s * 1000 for record in report.records), default=0.0),
        "common_errors": [{"error": error, "count": count} for error, count in common],
    }


def _lists(report: Report) -> dict[str, Any]:
    records = report.records
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [list(record.gaps_s) for record in records],
        "errors": [record.error for record in records],
        "start_times": [record.sent_s for record in records],
    }


@dataclass(frozen=True, slots=True)
class Best:
    """At `highest_rate_within_slo`, and at all lower ones, at least `wanted_attainment` of the requests met the SLO; it
    is 0 where there is none. `best_goodput` is the most requests/s that met it at any rate, at `best_goodput_rate`."""

    wanted_attainment: float
    highest_rate_within_slo: float
    best_goodput: float
    best_goodput_rate: float


def best_of(reports: Sequence[Report], attainment: float) -> Best:
    """The best of one or more reports. `attainment` is the share of requests that is to meet the SLO."""
    ascending = sorted(reports, key=lambda report: report.rate)
    met = [report.rate for report in takewhile(lambda report: report.attainment >= attainment, ascending)]
    best = max(reports, key=lambda report: report.goodput)
    return Best(attainment, max(met, default=0.0), best.goodput, best.rate)
