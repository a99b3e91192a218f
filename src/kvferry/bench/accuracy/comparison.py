"""How far two runs over the same prompts are apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvferry.bench.accuracy.completion import Answer
from kvferry.bench.accuracy.items import Item
from kvferry.bench.report.record import percentile

# The largest float is about e to the power of 709.
MAX_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one server says of all prompts, and of the tokens of their references."""

    answers: tuple[Answer, ...]
    scores: tuple[Answer, ...]

    @property
    def all(self) -> tuple[Answer, ...]:
        return (*self.answers, *self.scores)


@dataclass(frozen=True)
class Comparison:
    """A run beside the baseline, prompt by prompt and reference by reference."""

    items: tuple[Item, ...]
    baseline: Run
    run: Run

    @cached_property
    def errors(self) -> list[str]:
        """What went wrong in this run with what the baseline has answered."""
        return [other.error for one, other in self._pairs if other.error and not one.error]

    @cached_property
    def divergences(self) -> dict[str, int]:
        """The place of the first token that differs, by the name of each prompt whose answers differ."""
        found = {item.name: first_difference(one, other) for item, one, other in self._answered}
        return {name: first for name, first in found.items() if first is not None}

    @property
    def num_compared(self) -> int:
        return len(self._answered)

    @property
    def num_empty(self) -> int:
        """How many answers of the baseline have no tokens."""
        return sum(not one.tokens for _, one, _ in self._answered)

    @property
    def num_equal(self) -> int:
        return self.num_compared - len(self.divergences)

    @cached_property
    def differences(self) -> list[float]:
        """How far log-probabilities differ for all tokens up to the first that differs and all tokens of references."""
        pairs = [*((one, other) for _, one, other in self._answered), *self._scored]
        cut = [(one.logprobs[: first_difference(one, other)], other.logprobs) for one, other in pairs]
        return [abs(mine - theirs) for one, other in cut for mine, theirs in zip(one, other, strict=False)]

    @property
    def mean_difference(self) -> float:
        return math.fsum(self.differences) / len(self.differences) if self.differences else 0.0

    def difference(self, part: float) -> float:
        """The value that `part` percent of the differences do not exceed."""
        return percentile(self.differences, part)

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the references; None without any."""
        return perplexity([other for _, other in self._scored])

    @property
    def num_split(self) -> int | None:
        """The number of answers whose cache was moved; None where no answer says which way it went."""
        said = [answer for answer in self.run.all if answer.path]
        return sum(answer.is_split for answer in said) if said else None

    @property
    def num_correct(self) -> int:
        return num_correct(self.items, self.run.answers)

    @property
    def _pairs(self) -> list[tuple[Answer, Answer]]:
        return list(zip(self.baseline.all, self.run.all, strict=True))

    @cached_property
    def _answered(self) -> list[tuple[Item, Answer, Answer]]:
        triples = zip(self.items, self.baseline.answers, self.run.answers, strict=True)
        return [(item, one, other) for item, one, other in triples if not (one.error or other.error)]

    @cached_property
    def _scored(self) -> list[tuple[Answer, Answer]]:
        pairs = zip(self.baseline.scores, self.run.scores, strict=True)
        return [(one, other) for one, other in pairs if not (one.error or other.error)]


@dataclass(frozen=True, slots=True)
class Measured:
    """The baseline is the whole server, asked one request at a time; split and control are asked several at once.
    `unscored` says why references were not measured, where they should have been."""

    items: tuple[Item, ...]
    baseline: Run
    split: Comparison
    control: Comparison | None
    unscored: str

    @property
    def num_different_by_chance(self) -> int | None:
        """How many answers differ in the control; None without one."""
        return len(self.control.divergences) if self.control is not None else None

    @property
    def left_out(self) -> list[str]:
        """What the whole server says of prompts that it cannot take: those are not compared."""
        return [answer.error for answer in self.baseline.all if answer.is_unfit]

    @property
    def failures(self) -> list[str]:
        """What else went wrong with the whole server."""
        own = [answer.error for answer in self.baseline.all if answer.error and not answer.is_unfit]
        return own + (self.control.errors if self.control else [])


def first_difference(one: Answer, other: Answer) -> int | None:
    """The place of the first token that differs, by ids where both servers tell them. None for equal answers."""
    mine, theirs = (one.ids, other.ids) if one.ids and other.ids else (one.tokens, other.tokens)
    pairs = enumerate(zip(mine, theirs, strict=False))
    shorter = min(len(mine), len(theirs))
    first = next((place for place, (this, that) in pairs if this != that), shorter)
    return None if first == len(mine) == len(theirs) else first


def perplexity(scores: Sequence[Answer]) -> float | None:
    values = [value for score in scores for value in score.logprobs]
    return math.exp(min(-math.fsum(values) / len(values), MAX_EXPONENT)) if values else None


def num_correct(items: Sequence[Item], answers: Sequence[Answer]) -> int:
    """The number of answers that begin as they should, where that is known."""
    pairs = zip(items, answers, strict=True)
    return sum(item.has_answer and answer.text.strip().startswith(item.answer.strip()) for item, answer in pairs)
