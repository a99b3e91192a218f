"""What became of requests, and how busy a fleet was, as figures. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.report.record import PERCENTILES, Summary, percentile, summary
from kvferry.bench.report.slo import ItlBy, Slo

# The share of an answer's gaps that may be slow if its time between tokens is judged by their 99th percentile.
MAX_SLOW_SHARE = 0.01


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of the virtual clock, and infinite for what has not happened. `failure` is
    empty where the answer was whole, or had not ended when the run did. `num_slow` gaps between tokens were longer than
    the limit."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float = math.inf
    last_s: float = math.inf
    ended_s: float = math.inf
    num_slow: int = 0
    num_retries: int = 0
    is_alone: bool = False
    is_recomputed: bool = False
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """The mean time between tokens; 0 for answers of one, infinite for one that has not ended."""
        if self.output_tokens <= 1:
            return 0.0
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if math.isfinite(self.last_s) else math.inf

    @property
    def is_answered(self) -> bool:
        return math.isfinite(self.last_s) and not self.failure

    @property
    def is_unfinished(self) -> bool:
        """Whether it had neither been answered nor failed when the run ended."""
        return math.isinf(self.last_s) and not self.failure

    def meets(self, slo: Slo) -> bool:
        """Whether it was answered, whole and within the limits."""
        if not self.is_answered:
            return False
        is_steady = self.itl_s <= slo.itl_s
        if slo.itl_by is ItlBy.P99:
            is_steady = self.num_slow <= MAX_SLOW_SHARE * (self.output_tokens - 1)
        return self.ttft_s <= slo.ttft_s and is_steady and self.last_s - self.arrived_s <= slo.e2el_s


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of requests, of which `good_share` met the limits. `num_arrived` requests arrived from `begins_s` to
    `ends_s`: these ones, or others as well. `goodput` is the rate of good ones if all of them are like these.

    Times are of answers, None where there are none. Requests that were unfinished when the run ended count as later
    than all of them: their time to the first token is infinite if that has not come, and their time between tokens if
    it has. `answered_itl_s` is the mean time between tokens without them.
    """

    begins_s: float
    ends_s: float
    num_arrived: int
    num_requests: int
    num_good: int
    num_failed: int
    num_unfinished: int
    num_retried: int
    num_alone: int
    num_recomputed: int
    ttft_s: Summary | None
    itl_s: Summary | None
    answered_itl_s: float | None

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_requests if self.num_requests else 0.0

    @property
    def goodput(self) -> float:
        seconds = self.ends_s - self.begins_s
        if seconds <= 0 or not self.num_requests:
            return 0.0
        return self.num_good * self.num_arrived / self.num_requests / seconds


def figures_of(outcomes: Sequence[Outcome], slo: Slo, begins_s: float, ends_s: float) -> Figures:
    """The figures of requests that arrived from `begins_s` to before `ends_s`. `outcomes` are in order of arrival."""
    first, last = (bisect_left(outcomes, edge, key=lambda each: each.arrived_s) for edge in (begins_s, ends_s))
    found = outcomes[first:last]
    # Without those that are unfinished, the longer all wait the shorter the times of the others would look.
    timed = [each for each in found if each.is_answered or each.is_unfinished]
    gaps_s = [each.itl_s for each in timed if each.output_tokens > 1 and math.isfinite(each.first_s)]
    answered_s = [each for each in gaps_s if math.isfinite(each)]
    return Figures(
        begins_s,
        ends_s,
        num_arrived=len(found),
        num_requests=len(found),
        num_good=sum(each.meets(slo) for each in found),
        num_failed=len(found) - len(timed),
        num_unfinished=sum(each.is_unfinished for each in found),
        num_retried=sum(each.num_retries > 0 for each in found),
        num_alone=sum(each.is_alone for each in found),
        num_recomputed=sum(each.is_recomputed for each in found),
        ttft_s=_summary([each.ttft_s for each in timed]),
        itl_s=_summary(gaps_s),
        answered_itl_s=sum(answered_s) / len(answered_s) if answered_s else None,
    )


def _summary(values: Sequence[float]) -> Summary | None:
    """The same as `summary`, of values some of which may be infinite: so are then the mean, and percentiles that fall
    on one of them."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) == len(values):
        return summary(values)
    # In their place, any value that is as large as the others leaves the percentiles below them as they are.
    filled = finite + [max(finite, default=0.0)] * (len(values) - len(finite))

    def part(percent: int) -> float:
        last = -(-(len(values) - 1) * percent // 100)
        return percentile(filled, percent) if last < len(finite) else math.inf

    return Summary(math.inf, part(50), math.inf, tuple(map(part, PERCENTILES)))
