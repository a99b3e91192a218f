"""Steps last at least as long as they are said to."""

from __future__ import annotations

import time

from kvferry.connectors.step_cost import StepCost
from kvferry.connectors.transformers.simulated_step_time import SimulatedStepTime


class Scheduled:
    def __init__(self, query_length: int, generated: list[int]) -> None:
        self.query_length = query_length
        self.state = type("State", (), {"generated_tokens": generated})()


def test_a_step_takes_at_least_what_its_tokens_and_sequences_cost():
    step_time, computed = SimulatedStepTime(StepCost(token_s=0.01, step_s=0.02, sequence_s=0.05)), []
    began = time.perf_counter()
    step_time.scheduled([Scheduled(3, []), Scheduled(1, [7])])
    step_time.step(computed.append, "model")
    # What the engine owes from before is at most 20 ms.
    assert time.perf_counter() - began >= 0.03 + 0.02 + 0.05 - 0.0201
    assert computed == ["model"]


def test_a_slow_real_step_is_not_made_slower():
    step_time, slept = SimulatedStepTime(StepCost(step_s=1e-9)), []
    step_time.scheduled([Scheduled(1, [])])
    step_time.step(slept.append, "model")
    assert slept == ["model"]
