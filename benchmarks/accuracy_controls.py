"""What changes answers without a transfer, and how far a split is from that: what `accuracy.py` compares with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Run, first_difference
from kvferry.bench.accuracy.completion import Answer
from kvferry.bench.accuracy.items import Item

__all__ = ["Beside", "beside", "mean_of_answers", "with_first_token"]


async def with_first_token(whole: Server, items: tuple[Item, ...], baseline: Run, answer_tokens: int) -> Comparison:
    """The rest of each answer of the baseline, and what follows if its first token is a part of the prompt.

    A split computes the last token of a prompt in a step of its own, which the whole computes with the prompt. Here it
    is the other way round for one token, on one server. Raises ClientError, OSError or ValueError where that cannot
    tell the tokens of prompts and answers.
    """
    if not all(answer.ids for answer in baseline.answers):
        raise ValueError("the server does not tell the token ids of its answers")
    prompts = [(*(await whole.tokenize(item.prompt)), *answer.ids[:1]) for item, answer in pairs(items, baseline)]
    answers = await whole.answers(prompts, answer_tokens - 1, lambda: None)
    # Where there is nothing after the first token, there is nothing to compare.
    followed = [
        (rest(answer), other if len(answer.ids) > 1 else rest(answer))
        for answer, other in zip(baseline.answers, answers, strict=True)
    ]
    one, other = zip(*followed, strict=True)
    return Comparison(items, Run(one, ()), Run(other, ()))


def pairs(items: tuple[Item, ...], run: Run) -> list[tuple[Item, Answer]]:
    return list(zip(items, run.answers, strict=True))


def rest(answer: Answer) -> Answer:
    return replace(answer, tokens=answer.tokens[1:], ids=answer.ids[1:], logprobs=answer.logprobs[1:])


@dataclass(frozen=True)
class Beside:
    """By how much the mean difference of one comparison is above that of another, and how far chance moves that."""

    difference: float
    standard_error: float


def beside(one: Comparison, other: Comparison) -> Beside:
    """Of answers over the same prompts, without references. Tokens of one answer are not independent, prompts are."""
    (mean, parts), (others_mean, others_parts) = spread(one), spread(other)
    errors = [mine - theirs for mine, theirs in zip(parts, others_parts, strict=True)]
    # Of few prompts the spread is underestimated.
    factor = len(errors) / max(len(errors) - 1, 1)
    return Beside(mean - others_mean, math.sqrt(factor * math.fsum(error * error for error in errors)))


def mean_of_answers(comparison: Comparison) -> float:
    """The mean difference of log-probability of answers alone, up to the first token that differs."""
    return spread(comparison)[0]


def spread(comparison: Comparison) -> tuple[float, list[float]]:
    """The mean difference of a token, and what each prompt adds to what it is off by: a ratio's linearised error."""
    found = [differences(*each) for each in zip(comparison.baseline.answers, comparison.run.answers, strict=True)]
    number = sum(map(len, found)) or 1
    mean = math.fsum(map(math.fsum, found)) / number
    return mean, [(math.fsum(each) - mean * len(each)) / number for each in found]


def differences(one: Answer, other: Answer) -> Sequence[float]:
    common = slice(first_difference(one, other))
    rows = zip(one.logprobs[common], other.logprobs[common], strict=False)
    return [abs(mine - theirs) for mine, theirs in rows]
