"""Whether a split is as good as the whole. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.bench.accuracy.comparison import Comparison, Measured

# Counts of different answers that have the same cause lie so many standard deviations apart in one run of a hundred.
DEVIATIONS = 2.5
# Differences of log-probabilities up to this are rounding, whatever the control has.
ROUNDING = 1e-4
# If a smaller share of requests went through the split, the whole server was mostly compared with another whole one.
LEAST_SPLIT = 0.5
# With a larger share of answers without tokens nothing can be learned.
MOST_EMPTY = 0.5
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """`min_equal` is the share of answers that must be equal, None for no share. The split's mean difference may be at
    most `factor` times that of the control."""

    min_equal: float | None = None
    factor: float = 2.0


def faults(measured: Measured, limits: Limits) -> list[str]:
    """Why the split is not as good as the whole, or was not compared, in words; empty if it is."""
    return [*_not_compared(measured), *_empty(measured.split), *_different(measured, limits)]


def remarks(different: int, compared: int, by_chance: int | None, num_split: int | None) -> Iterator[str]:
    """What a reader should know of a comparison, and is no fault: the numbers are those of `too_many_differ`, and how
    many requests went through a split, None where nobody says so."""
    if num_split is None:
        yield "nothing says which way the requests went: --url may be one server that does everything, too"
    if by_chance is not None and 0 < different <= by_chance and _most_by_chance(by_chance) >= compared:
        yield f"{different} of {compared} answers differ, and {by_chance} in the control: that says little of the split"


def _not_compared(measured: Measured) -> Iterator[str]:
    split = measured.split
    if measured.failures:
        yield f"{len(measured.failures)} requests to the whole server failed, the first: {measured.failures[0]}"
    elif not split.num_compared and measured.left_out:
        yield f"the whole server has answered nothing: {measured.left_out[0]}"
    if split.errors:
        yield f"{len(split.errors)} requests to the split failed, the first: {split.errors[0]}"
    if any(answer.is_split for answer in measured.baseline.all):
        yield "what was to be the whole server is a split itself"
    num_asked = sum(not answer.is_unfit for answer in measured.baseline.all)
    if split.num_split is not None and split.num_split < LEAST_SPLIT * num_asked:
        yield f"only {split.num_split} of {num_asked} requests went through a split"


def _empty(split: Comparison) -> Iterator[str]:
    """Answers without tokens are all equal."""
    num_empty, compared = split.num_empty, split.num_compared
    if num_empty > MOST_EMPTY * compared:
        yield f"{num_empty} of {compared} answers of the whole server are empty"


def _different(measured: Measured, limits: Limits) -> Iterator[str]:
    split, control = measured.split, measured.control
    by_chance = measured.num_different_by_chance
    yield from too_many_differ(len(split.divergences), split.num_compared, by_chance, limits.min_equal)
    if control is None:
        return
    if split.mean_difference > limits.factor * control.mean_difference + ROUNDING:
        ours, theirs = split.mean_difference, control.mean_difference
        more = f"more than {limits.factor:g} times the control's {theirs:.2g}"
        yield f"log-probabilities differ by {ours:.2g} on average, {more}"


def too_many_differ(different: int, compared: int, by_chance: int | None, min_equal: float | None) -> Iterator[str]:
    """Why too many of the `compared` answers differ. `by_chance` is how many do in a control, None without one."""
    if min_equal is not None and compared - different < min_equal * compared - SLACK:
        yield f"{different} of {compared} answers differ; expected at least {min_equal:.1%} to be equal"
    if by_chance is None:
        return
    most = _most_by_chance(by_chance)
    if different > most:
        yield f"{different} of {compared} answers differ, where {by_chance} do in the control"
    elif different > by_chance and most >= compared:
        yield f"{different} of {compared} answers differ: these are too few to tell whether that is chance"


def _most_by_chance(by_chance: int) -> float:
    """How many different answers may have the cause that so many have in the control."""
    return by_chance + DEVIATIONS * math.sqrt(2 * by_chance + 1)
