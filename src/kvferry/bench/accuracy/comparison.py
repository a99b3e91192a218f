"""How far two runs over the same prompts are apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvferry.bench.accuracy.completion import Answer
from kvferry.bench.accuracy.items import Item
from kvferry.bench.report.record import percentile

DISAGGREGATED = "disaggregated"
# Of so many answers that differ by chance, two standard deviations (Poisson) more are chance as well.
DEVIATIONS = 2.0
# Differences of log-probabilities up to this are rounding, whatever the control has.
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Run:
    """What one server says of all prompts, and of the tokens of their references."""

    answers: tuple[Answer, ...]
    scores: tuple[Answer, ...]


@dataclass(frozen=True)
class Comparison:
    """Answers of a run beside those of the baseline, prompt by prompt, and scores of references likewise."""

    items: tuple[Item, ...]
    baseline: tuple[Answer, ...]
    answers: tuple[Answer, ...]
    baseline_scores: tuple[Answer, ...] = ()
    scores: tuple[Answer, ...] = ()

    @cached_property
    def errors(self) -> list[str]:
        """What went wrong in this run with what the baseline has answered."""
        return [other.error for one, other in self._pairs if other.error and not one.error]

    @cached_property
    def left_out(self) -> list[str]:
        """Why the baseline has not answered, as where prompts are too long for its model: those are not compared."""
        return [one.error for one, _ in self._pairs if one.error]

    @cached_property
    def divergences(self) -> dict[str, int]:
        """Of each prompt whose answers differ, the first token that does."""
        return {
            item.name: first
            for item, one, other in self._answered
            if (first := _first_difference(one.tokens, other.tokens)) is not None
        }

    @property
    def num_compared(self) -> int:
        return len(self._answered)

    @property
    def num_equal(self) -> int:
        return self.num_compared - len(self.divergences)

    @cached_property
    def differences(self) -> list[float]:
        """Of the log-probabilities of all tokens up to the first that differs, and of all tokens of references."""
        pairs = [(one, other) for _, one, other in self._answered] + self._scored
        return [
            abs(mine - theirs)
            for one, other in pairs
            for mine, theirs in zip(
                one.logprobs[: _first_difference(one.tokens, other.tokens)], other.logprobs, strict=False
            )
        ]

    @property
    def mean_difference(self) -> float:
        return math.fsum(self.differences) / len(self.differences) if self.differences else 0.0

    def difference(self, part: float) -> float:
        """So many percent of the differences are at most this."""
        return percentile(self.differences, part)

    @property
    def perplexity(self) -> float | None:
        """Of the references; None without any."""
        return perplexity([other for _, other in self._scored])

    @property
    def num_disaggregated(self) -> int | None:
        """How many answers a router says to have got from a split; None where none of them has said anything."""
        said = [answer.path for answer in (*self.answers, *self.scores) if answer.path]
        return sum(path == DISAGGREGATED for path in said) if said else None

    @property
    def num_correct(self) -> int:
        return num_correct(self.items, self.answers)

    @property
    def _pairs(self) -> list[tuple[Answer, Answer]]:
        scores = zip(self.baseline_scores, self.scores, strict=True)
        return [*zip(self.baseline, self.answers, strict=True), *scores]

    @cached_property
    def _answered(self) -> list[tuple[Item, Answer, Answer]]:
        triples = zip(self.items, self.baseline, self.answers, strict=True)
        return [(item, one, other) for item, one, other in triples if not (one.error or other.error)]

    @cached_property
    def _scored(self) -> list[tuple[Answer, Answer]]:
        pairs = zip(self.baseline_scores, self.scores, strict=True)
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


def _first_difference(one: Sequence[int | str], other: Sequence[int | str]) -> int | None:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def perplexity(scores: Sequence[Answer]) -> float | None:
    values = [value for score in scores for value in score.logprobs]
    return math.exp(-math.fsum(values) / len(values)) if values else None


def num_correct(items: Sequence[Item], answers: Sequence[Answer]) -> int:
    """Answers that begin as they should, where that is known."""
    pairs = zip(items, answers, strict=True)
    return sum(bool(item.answer) and answer.text.strip().startswith(item.answer) for item, answer in pairs)


def faults(split: Comparison, control: Comparison | None, min_equal: float | None, factor: float) -> list[str]:
    """Why the split is not as good as the whole, in words; empty if it is.

    What differs is measured by the control, the same server asked in other batches: `factor` times its mean difference,
    and as many different answers as chance makes of the control's.
    """
    found = []
    if not split.num_compared and split.left_out:
        found.append(f"the whole server has answered nothing: {split.left_out[0]}")
    if split.errors:
        found.append(f"{len(split.errors)} requests failed, the first: {split.errors[0]}")
    if split.num_disaggregated == 0:
        found.append("not one request was split: nothing was compared but two whole servers")
    different, compared = len(split.divergences), split.num_compared
    if min_equal is not None and split.num_equal < min_equal * compared:
        found.append(f"{different} of {compared} answers differ; expected at least {min_equal:.1%} to be equal")
    if control is not None:
        by_chance = len(control.divergences)
        if different > by_chance + DEVIATIONS * math.sqrt(by_chance + 1):
            found.append(f"{different} of {compared} answers differ, where {by_chance} do in the control")
        if split.mean_difference > factor * control.mean_difference + ROUNDING:
            found.append(
                f"log-probabilities differ by {split.mean_difference:.2g} on average, more than {factor:g} times the "
                f"control's {control.mean_difference:.2g}"
            )
    return found
