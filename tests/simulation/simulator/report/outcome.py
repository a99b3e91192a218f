"""How a run ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `violation` is empty when nothing was wrong. The counters are for the summary."""

    seed: int
    violation: str
    outcomes: Counter[str]
    injected: Counter[str]
    virtual_s: float
    log: tuple[str, ...] = ()
