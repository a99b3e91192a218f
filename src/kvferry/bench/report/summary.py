"""Means and percentiles. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (90, 95, 99)


def percentile(values: Sequence[float], part: float) -> float:
    """`part` (0 to 100) of the values are at most this, by linear interpolation, as numpy does; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * part / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    # Between the two, whatever rounding makes of it.
    between = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return min(max(between, ordered[low]), ordered[high])


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many values, in their own unit; all 0 when there are none. `percentiles` are those of `PERCENTILES`."""

    mean: float
    median: float
    std: float
    percentiles: tuple[float, ...]

    @property
    def p99(self) -> float:
        return self.percentiles[PERCENTILES.index(99)]


def summary(values: Sequence[float]) -> Summary:
    mean = math.fsum(values) / len(values) if values else 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0
    parts = tuple(percentile(values, part) for part in PERCENTILES)
    return Summary(mean, percentile(values, 50), math.sqrt(variance), parts)
