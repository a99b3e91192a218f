"""Steps that last longer give the same tokens."""

from __future__ import annotations

import time
from pathlib import Path

from embedded_support import Loop, expect_empty, ids_of, request

from kvferry.connectors.jobs import Settings
from kvferry.connectors.step_cost import StepCost
from kvferry.connectors.transformers import Pace
from kvferry.embedded.engine import Engine


class Scheduled:
    def __init__(self, query_length: int, generated: list[int]) -> None:
        self.query_length = query_length
        self.state = type("State", (), {"generated_tokens": generated})()


def test_a_step_takes_at_least_what_its_tokens_and_sequences_cost():
    pace, computed = Pace(StepCost(token_s=0.01, step_s=0.02, sequence_s=0.05)), []
    began = time.perf_counter()
    pace.scheduled([Scheduled(3, []), Scheduled(1, [7])])
    pace.step(computed.append, "model")
    # What the engine owes from before is at most 20 ms.
    assert time.perf_counter() - began >= 0.03 + 0.02 + 0.05 - 0.0201
    assert computed == ["model"]


def test_a_slow_real_step_is_not_made_slower():
    pace, slept = Pace(StepCost(step_s=1e-9)), []
    pace.scheduled([Scheduled(1, [])])
    pace.step(slept.append, "model")
    assert slept == ["model"]


def test_an_engine_whose_steps_are_simulated_answers_with_the_same_tokens(
    loop: Loop, source: Engine, model_path: Path
) -> None:
    cost = StepCost(token_s=1e-5, step_s=5e-3)
    settings = Settings(str(model_path), block_tokens=16, num_blocks=32, max_batch_tokens=16, step_cost=cost)
    expected = loop.run(ids_of(source.generate(request("at-full-speed", 40))))
    engine = Engine(settings)
    loop.run(engine.start())
    try:
        began = time.perf_counter()
        assert loop.run(ids_of(engine.generate(request("simulated", 40)))) == expected
        # Three chunks of the prompt and seven more tokens are ten steps; see above for the rest.
        assert time.perf_counter() - began >= 10 * 5e-3 + 40 * 1e-5 - 0.0201
        expect_empty(loop, engine)
    finally:
        loop.run(engine.close())
