"""How the engines of a run stage what they fetch, drawn from its seed: which strategies, how large slots, how many."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvferry.plan.strategy.calibration import TYPICAL_HOST, Costs
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.target.read_strategy import AUTO, StagingPolicy

ALLOWED = (
    (Strategy.DIRECT,),
    (Strategy.SCATTER,),
    (Strategy.PACK,),
    (Strategy.PACK,),
    AUTO,
)
MAX_SLOTS = 8
"""About so many of the smallest slots make the longest request."""


@dataclass(frozen=True, slots=True)
class StagingSetup:
    """`half_bytes` of staging memory for what comes in, and as much for what goes out, on every rank of a run."""

    largest_slot_bytes: int
    half_bytes: int
    costs: Costs

    @classmethod
    def drawn(cls, rng: random.Random, request_bytes: int) -> StagingSetup:
        """`request_bytes` is about what the longest request has on one rank."""
        largest = max(1, request_bytes // rng.randint(1, MAX_SLOTS) + rng.randint(-3, 3))
        # Slots are scarce: two requests at a time, or two slots of one, want more than there are.
        half_bytes = largest * rng.choice([1, 1, 2, 4]) + rng.randint(0, 2)
        row_s, sharing_s = rng.choice([1e-9, 3e-6, 1e-3]), rng.choice([0.0, 1e-12])
        return cls(largest, half_bytes, replace(TYPICAL_HOST, row_s=row_s, sharing_s=sharing_s, slot_bytes=largest))

    def policy(self, rng: random.Random) -> StagingPolicy:
        """Of one engine."""
        allowed = rng.choice(ALLOWED)
        least = max(1, self.largest_slot_bytes // 2)
        return StagingPolicy(
            allowed, rng.choice([self.largest_slot_bytes, rng.randint(least, self.largest_slot_bytes)])
        )
