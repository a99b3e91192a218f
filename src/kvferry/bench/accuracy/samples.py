"""What lm-eval says of each sample of its tasks, and how far two of its runs are apart. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import msgspec

from kvferry.bench.accuracy.verdict import DEVIATIONS, LEAST_SPLIT, MOST_EMPTY, too_many_differ
from kvferry.errors import ConfigurationError

Document = tuple[str, int]
"""A task, and a number in it."""
Place = tuple[Document, str]
"""A document, and the name of the filter that its answer went through."""
Score = tuple[str, str, str]
"""A task, a metric and a filter."""


class Line(msgspec.Struct, frozen=True):
    """A line of a samples file of lm-eval, as far as it is looked at; `arguments` are those of its requests."""

    doc_id: int
    resps: tuple[tuple[str, ...], ...]
    arguments: dict[str, dict[str, Any]]
    filter: str = "none"
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The answers to one document, by request and repeat, and its scores by metric."""

    answers: tuple[tuple[str, ...], ...]
    scores: Mapping[str, float]


Samples = Mapping[Place, Sample]


def read_samples(task: str, lines: Iterable[str], salt: str) -> dict[Place, Sample]:
    """The samples of a file (`samples_<task>_<date>.jsonl`). Raises ConfigurationError for a file of another kind, and
    where a request was sent without our `cache_salt` and temperature, as by tasks that make their own."""
    found = {}
    for number, text in enumerate(lines, 1):
        try:
            # What lm-eval writes may have NaN or Infinity in it, which msgspec refuses.
            fields = json.loads(text)
            line = msgspec.convert(fields, Line)
        except ValueError as error:
            what = f"line {number} of lm-eval's samples of {task} is not one of generated text"
            expected = "tasks that generate text (output_type: generate_until)"
            raise ConfigurationError(what, found=str(error), expected=expected) from None
        for asked in line.arguments.values():
            _check(task, asked.get("arg_1"), salt)
        values = {name: fields.get(name) for name in line.metrics}
        scores = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        finite = {name: value for name, value in scores.items() if math.isfinite(value)}
        found[(task, line.doc_id), line.filter] = Sample(line.resps, finite)
    return found


@dataclass(frozen=True)
class TaskComparison:
    """One run of lm-eval beside another. `num_split` is how many requests a router has meanwhile sent through a prefill
    and a decode engine, and not lost their caches; None where there is no router."""

    baseline: Samples
    run: Samples
    num_split: int | None = None

    @cached_property
    def different(self) -> list[Document]:
        """The documents whose answers differ, or that only one run has."""
        one, other = _answers(self.baseline), _answers(self.run)
        return [document for document in self._documents if one.get(document) != other.get(document)]

    @property
    def num_compared(self) -> int:
        return len(self._documents)

    @property
    def num_requests(self) -> int:
        """The number of requests of the baseline. A task may ask for each document several times."""
        return sum(len(repeats) for answers in _answers(self.baseline).values() for repeats in answers)

    @cached_property
    def scores(self) -> dict[Score, float]:
        """The mean of each score over the documents."""
        return {score: math.fsum(values) / len(values) for score, values in _by_score(self.run).items()}

    @cached_property
    def changes(self) -> dict[Score, list[float]]:
        """How much the score of each document has changed, for each kind of score."""
        pairs = ((place, self.baseline[place], sample) for place, sample in self.run.items() if place in self.baseline)
        changed: dict[Score, list[float]] = {}
        for ((task, _), used), before, after in pairs:
            for metric in before.scores.keys() & after.scores.keys():
                changed.setdefault((task, metric, used), []).append(after.scores[metric] - before.scores[metric])
        return changed

    @property
    def _documents(self) -> list[Document]:
        return sorted({document for document, _ in (*self.baseline, *self.run)})


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The baseline is the whole server, asked one request at a time; split and control are asked several at once.
    `failure` says why lm-eval could not ask the split everything; empty if it could."""

    baseline: Samples
    split: TaskComparison
    control: TaskComparison | None
    failure: str = ""


def task_faults(runs: TaskRuns, min_equal: float | None) -> Iterator[str]:
    """Why the split is not as good as the whole, in words; nothing if it is."""
    split = runs.split
    if runs.failure:
        yield f"the split did not answer everything: {runs.failure}"
        return
    answers = _answers(runs.baseline).values()
    num_empty = sum(not any(text for repeats in each for text in repeats) for each in answers)
    if num_empty > MOST_EMPTY * len(answers) or not answers:
        yield f"{num_empty} of {len(answers)} answers of the whole server are empty"
    by_chance = len(runs.control.different) if runs.control else None
    yield from too_many_differ(len(split.different), split.num_compared, by_chance, min_equal)
    most = _deviations(len(split.changes))
    for (task, metric, used), changes in split.changes.items():
        # Changes by chance go up as often as down.
        if abs(math.fsum(changes)) > most * math.sqrt(math.fsum(change**2 for change in changes)):
            name = named((task, metric, used))
            yield f"{name} changes by {math.fsum(changes) / len(changes):+.3f}, more than chance makes it"
    if split.num_split is not None and split.num_split < LEAST_SPLIT * split.num_requests:
        yield f"only {split.num_split} of {split.num_requests} requests went through a split"


def named(score: Score) -> str:
    """A score in words: its task and metric, and the filter where there is one."""
    task, metric, used = score
    return f"{task}: {metric}" if used == "none" else f"{task}: {metric} ({used})"


def _deviations(num_scores: int) -> float:
    """The number of standard deviations beyond which any of so many scores lies as rarely by chance as a single one
    beyond `DEVIATIONS`."""
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-DEVIATIONS) / max(num_scores, 1))


def _check(task: str, settings: Any, salt: str) -> None:
    told = settings if isinstance(settings, dict) else {}
    if told.get("cache_salt") != salt or told.get("temperature", 0):
        raise ConfigurationError(
            f"the task {task} does not ask as it is told",
            found=f"requests with {json.dumps(settings, default=str)}",
            expected="requests with the gen_kwargs of lm-eval's configuration: cache_salt and temperature",
            hint="tasks that are programs may ignore them: take another one",
        )


def _answers(samples: Samples) -> dict[Document, tuple[tuple[str, ...], ...]]:
    """The answers to each document, which are the same for all filters."""
    return {document: sample.answers for (document, _), sample in samples.items()}


def _by_score(samples: Samples) -> dict[Score, list[float]]:
    found: dict[Score, list[float]] = {}
    for ((task, _), used), sample in samples.items():
        for metric, value in sample.scores.items():
            found.setdefault((task, metric, used), []).append(value)
    return found
