"""The metrics of servers as numbers: sums over labels, rates and percentiles between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples at one time, by name; `at_s` is seconds of any clock."""

    at_s: float
    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of a name that have these labels; 0 when there is none."""
        wanted = labels.items()
        return sum(value for found, value in self.samples.get(name, ()) if wanted <= found.items())

    def rate(self, before: Reading, name: str, **labels: str) -> float:
        """Per second since an earlier reading; 0 when no time has passed or a counter began anew."""
        seconds = self.at_s - before.at_s
        return max(self.total(name, **labels) - before.total(name, **labels), 0.0) / seconds if seconds > 0 else 0.0

    def by(self, label: str, name: str) -> dict[str, float]:
        """The sums per value of a label."""
        values = sorted({found[label] for found, _ in self.samples.get(name, ()) if label in found})
        return {value: self.total(name, **{label: value}) for value in values}

    def percentile(self, before: Reading, name: str, part: float, **labels: str) -> float:
        """Below what `part` of what came to a histogram since lies; 0 when nothing came.

        Between a bucket's edges what it holds is taken to be spread evenly, as PromQL's `histogram_quantile` does.
        """
        counts = sorted((float(edge), self._since(before, name, edge, labels)) for edge in self._edges(name))
        wanted = part * max((count for _, count in counts), default=0.0)
        lower = below = 0.0
        for edge, count in counts:
            if wanted and count >= wanted:
                return lower if isinf(edge) else lower + (edge - lower) * (wanted - below) / (count - below)
            lower, below = edge, count
        return 0.0

    def mean(self, before: Reading, name: str, **labels: str) -> float:
        """The mean of what came to a histogram since; 0 when nothing came."""
        count = self.total(f"{name}_count", **labels) - before.total(f"{name}_count", **labels)
        total = self.total(f"{name}_sum", **labels) - before.total(f"{name}_sum", **labels)
        return total / count if count > 0 else 0.0

    def _edges(self, name: str) -> set[str]:
        return {found["le"] for found, _ in self.samples.get(f"{name}_bucket", ())}

    def _since(self, before: Reading, name: str, edge: str, labels: Labels) -> float:
        bucket = f"{name}_bucket"
        return self.total(bucket, le=edge, **labels) - before.total(bucket, le=edge, **labels)


START = Reading(-inf, {})
"""What a router that has just started would show: what came since is all that came."""


def reading_of(text: str, at_s: float) -> Reading:
    """Read the text format of Prometheus. Raises ValueError when it is something else."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Reading(at_s, {name: tuple(values) for name, values in samples.items()})
