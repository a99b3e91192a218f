"""Service level objectives: limits on the time to the first token, between tokens, and to the end. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvferry.errors import ConfigurationError

if TYPE_CHECKING:
    from kvferry.bench.report.record import Record

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
EXAMPLE = "such as ttft=5s,itl=100ms,e2el=30s"


class ItlBy(StrEnum):
    """How one request's time between tokens is judged: by its mean, or by the 99th percentile of its gaps."""

    MEAN = "mean"
    P99 = "p99"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, of which every one must hold; infinity where there is none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    e2el_s: float = math.inf
    itl_by: ItlBy = ItlBy.MEAN

    @property
    def is_limited(self) -> bool:
        """Whether it asks for anything but an answer."""
        return any(map(math.isfinite, (self.ttft_s, self.itl_s, self.e2el_s)))

    def met_by(self, record: Record) -> bool:
        """Whether a request was answered, whole and within the limits."""
        itl_s = record.tpot_s if self.itl_by is ItlBy.MEAN else record.slow_gap_s
        in_time = record.ttft_s <= self.ttft_s and itl_s <= self.itl_s and record.e2el_s <= self.e2el_s
        return in_time and not record.error

    def as_json(self) -> dict[str, object]:
        """The limits that there are."""
        limits = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "e2el_s": self.e2el_s}
        return {name: value for name, value in limits.items() if math.isfinite(value)} | {"itl_by": str(self.itl_by)}


def slo_named(text: str, itl_by: ItlBy = ItlBy.MEAN) -> Slo:
    """`ttft=5s,itl=100ms,e2el=30s`, any of them. Raises ConfigurationError."""
    limits: dict[str, float] = {}
    for word in text.split(","):
        found = re.fullmatch(r"\s*(ttft|itl|e2el)\s*=\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m)\s*", word, re.ASCII)
        if found is None:
            raise ConfigurationError("invalid limit in --slo", found=word.strip() or text, expected=EXAMPLE)
        name = f"{found[1]}_s"
        if name in limits:
            raise ConfigurationError("--slo names a limit twice", found=text, expected=EXAMPLE)
        limits[name] = float(found[2]) * UNITS_S[found[3]]
        if not limits[name]:
            raise ConfigurationError("a limit in --slo must be above 0", found=word.strip(), expected=EXAMPLE)
    return Slo(itl_by=itl_by, **limits)
