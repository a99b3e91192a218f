"""Steps that last as long as its own would."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvferry.connectors.step_cost import StepCost

# An engine that had nothing to do does not catch up on it.
MAX_CATCH_UP_S = 0.02


class SimulatedStepTime:
    """Makes steps last as long as those of another model. Lives in the engine's thread."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._due = 0.0

    def scheduled(self, batch: list[Any]) -> None:
        """What the next step will compute. It begins when the one before was due to end: what lies between is ours."""
        num_decoded = sum(bool(scheduled.state.generated_tokens) for scheduled in batch)
        num_tokens = sum(scheduled.query_length for scheduled in batch) - num_decoded
        step_s = self._cost.seconds(num_tokens, num_decoded)
        self._due = max(self._due, time.perf_counter() - MAX_CATCH_UP_S) + step_s

    def step(self, compute: Callable[[Any], None], model: Any) -> None:
        """The real step, and then what is missing."""
        compute(model)
        time.sleep(max(0.0, self._due - time.perf_counter()))
