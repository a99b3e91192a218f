"""What `benchmarks/accuracy.py` says of bfloat16: how far a split is above a control, and how far chance moves that."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

import pytest

from kvferry.bench.accuracy.comparison import Comparison, Run
from kvferry.bench.accuracy.completion import Answer
from kvferry.bench.accuracy.items import Item

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_controls import beside, mean_of_answers, with_first_token


def answer(*logprobs: float, ids: tuple[int, ...] = ()) -> Answer:
    ids = ids or tuple(range(len(logprobs)))
    return Answer(tuple(map(str, ids)), ids, logprobs)


def comparison(*pairs: tuple[Answer, Answer]) -> Comparison:
    items = tuple(Item("a prompt", f"i{number}") for number in range(len(pairs)))
    one, other = zip(*pairs, strict=True)
    return Comparison(items, Run(one, ()), Run(other, ()))


def test_the_mean_is_that_of_tokens_up_to_the_first_that_differs():
    pairs = (answer(-1.0, -2.0), answer(-1.5, -2.0)), (answer(-1.0, -9.0), answer(-1.1, -1.0, ids=(0, 7)))
    assert mean_of_answers(comparison(*pairs)) == pytest.approx((0.5 + 0.0 + 0.1) / 3)


def test_the_same_answers_differ_by_nothing_and_no_chance_is_there():
    one = comparison((answer(-1.0), answer(-1.5)), (answer(-2.0), answer(-2.1)))
    found = beside(one, one)
    assert (found.difference, found.standard_error) == (0.0, 0.0)


def test_the_standard_error_is_what_other_prompts_would_move_the_difference_by():
    """Prompts differ in how much they differ; tokens of one do so together."""
    dice = random.Random(4)

    def drawn(factor: float) -> Comparison:
        pairs = []
        for _ in range(30):
            size = dice.uniform(0.0, 0.1) * factor
            logprobs = tuple(-dice.random() for _ in range(8))
            moved = tuple(value + size * dice.choice((-1, 1)) for value in logprobs)
            pairs.append((answer(*logprobs), answer(*moved)))
        return comparison(*pairs)

    found = [beside(drawn(1.2), drawn(1.0)) for _ in range(300)]
    spread = statistics.stdev(each.difference for each in found)
    assert statistics.fmean(each.standard_error for each in found) == pytest.approx(spread, rel=0.15)
    assert statistics.fmean(each.difference for each in found) == pytest.approx(0.01, abs=0.002)


class Whole:
    """A server that answers two tokens to everything."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return (100, 101)

    async def answers(self, prompts, max_tokens: int, progress) -> list[Answer]:
        self.asked = list(prompts)
        return [answer(-2.25, -3.0, ids=(5, 6)) for _ in self.asked]


async def test_the_first_token_of_an_answer_becomes_the_prompts_last():
    whole = Whole()
    baseline = Run((answer(-1.0, -2.0, -3.0, ids=(4, 5, 6)), answer(-1.0, ids=(9,))), ())
    items = (Item("x", "a"), Item("y", "b"))
    found = await with_first_token(whole, items, baseline, 3)
    assert whole.asked == [(100, 101, 4), (100, 101, 9)]
    # The second answer has no rest, so nothing can differ.
    assert (found.num_compared, found.divergences) == (2, {})
    assert found.differences == [0.25, 0.0]


async def test_a_server_that_does_not_tell_its_tokens_is_refused():
    baseline = Run((Answer(("a",), (), (-1.0,)),), ())
    with pytest.raises(ValueError, match="token ids"):
        await with_first_token(Whole(), (Item("x", "a"),), baseline, 3)
