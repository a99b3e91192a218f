"""The measurements of one request, and what many of them come to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (90, 95, 99)


def percentile(values: Sequence[float], part: float) -> float:
    """What `part` percent (0 to 100) of the values do not exceed, by linear interpolation. It is 0 without values."""
    return float(np.percentile(values, part)) if values else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one value or more, in their unit. `percentiles` are those of `PERCENTILES`."""

    mean: float
    median: float
    std: float
    percentiles: tuple[float, ...]

    @property
    def p99(self) -> float:
        return self.percentiles[PERCENTILES.index(99)]


def summary(values: Sequence[float]) -> Summary | None:
    """None without values: a time that nobody has measured is not 0."""
    if not values:
        return None
    parts = tuple(percentile(values, part) for part in PERCENTILES)
    return Summary(float(np.mean(values)), percentile(values, 50), float(np.std(values)), parts)


@dataclass(frozen=True, slots=True)
class Record:
    """Times in seconds. `due_s` and `sent_s` count from the start of the run, the others from `sent_s`.

    `gaps_s` are the times between two pieces of the answer. Servers put one token into a piece, or several, or half a
    character into none; `output_tokens` is their own count where they tell it, else the number of pieces. `error` is
    empty when the answer was whole.
    """

    due_s: float
    sent_s: float
    prompt_tokens: int
    output_tokens: int = 0
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    e2el_s: float = 0.0
    error: str = ""

    @property
    def late_s(self) -> float:
        """How much later than planned the request was sent: the load generator's own fault."""
        return max(self.sent_s - self.due_s, 0.0)

    @property
    def tpot_s(self) -> float:
        """The mean time between two tokens after the first; 0 for answers of one token."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def slow_gap_s(self) -> float:
        """The 99th percentile of the gaps; 0 without any."""
        return percentile(self.gaps_s, 99)
