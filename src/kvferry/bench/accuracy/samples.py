"""What lm-eval says of each sample of its tasks, and how far two of its runs are apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from kvferry.bench.accuracy.verdict import DEVIATIONS, LEAST_SPLIT, too_many_differ
from kvferry.errors import ConfigurationError

Document = tuple[str, int]
"""A task, and a number in it."""
Place = tuple[Document, str]
"""A document, and the name of the filter that its answer went through."""
Score = tuple[str, str, str]
"""A task, a metric and a filter."""


class Line(msgspec.Struct, frozen=True):
    """A line of a samples file of lm-eval, as far as it is looked at."""

    doc_id: int
    resps: Any
    filter: str = "none"
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The answers to one document, and its scores by metric."""

    answers: Any
    scores: Mapping[str, float]


Samples = Mapping[Place, Sample]


def read_samples(task: str, lines: Iterable[str]) -> dict[Place, Sample]:
    """Of one samples file (`samples_<task>_<date>.jsonl`). Raises ConfigurationError for a file of another kind."""
    found = {}
    for number, text in enumerate(lines, 1):
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
            line = msgspec.convert(fields, Line)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"line {number} of lm-eval's samples of {task} is not a sample", found=str(error)
            ) from None
        scores = {name: float(fields[name]) for name in line.metrics if isinstance(fields.get(name), int | float)}
        found[(task, line.doc_id), line.filter] = Sample(line.resps, scores)
    return found


@dataclass(frozen=True)
class TaskComparison:
    """One run of lm-eval beside another. `num_split` is how many requests a router has meanwhile sent through a prefill
    and a decode engine, None where there is no router."""

    baseline: Samples
    run: Samples
    num_split: int | None = None

    @cached_property
    def different(self) -> list[Document]:
        """Whose answers differ, or that only one run has."""
        one, other = _answers(self.baseline), _answers(self.run)
        return [document for document in self._documents if one.get(document) != other.get(document)]

    @property
    def num_compared(self) -> int:
        return len(self._documents)

    @property
    def _documents(self) -> list[Document]:
        return sorted({document for document, _ in (*self.baseline, *self.run)})

    @cached_property
    def scores(self) -> dict[Score, float]:
        """Means over the documents."""
        return {score: math.fsum(values) / len(values) for score, values in _by_score(self.run).items()}

    @cached_property
    def changes(self) -> dict[Score, list[float]]:
        """What became of each document's score."""
        pairs = ((place, self.baseline[place], sample) for place, sample in self.run.items() if place in self.baseline)
        changed: dict[Score, list[float]] = {}
        for ((task, _), used), before, after in pairs:
            for metric in before.scores.keys() & after.scores.keys():
                changed.setdefault((task, metric, used), []).append(after.scores[metric] - before.scores[metric])
        return changed


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The baseline is the whole server, asked one request at a time; split and control are asked several at once."""

    baseline: Samples
    split: TaskComparison
    control: TaskComparison | None


def task_faults(runs: TaskRuns, min_equal: float | None) -> Iterator[str]:
    """Why the split is not as good as the whole, in words; nothing if it is."""
    split = runs.split
    if not runs.baseline:
        yield "lm-eval has asked the whole server nothing"
    by_chance = len(runs.control.different) if runs.control else None
    yield from too_many_differ(len(split.different), split.num_compared, by_chance, min_equal)
    for (task, metric, _), changes in split.changes.items():
        # Changes by chance go up as often as down.
        if abs(math.fsum(changes)) > DEVIATIONS * math.sqrt(math.fsum(change**2 for change in changes)):
            yield f"{metric} of {task} changes by {math.fsum(changes) / len(changes):+.3f}, more than chance makes it"
    if split.num_split is not None and split.num_split < LEAST_SPLIT * split.num_compared:
        yield f"only {split.num_split} of {split.num_compared} requests went through a split"


def _answers(samples: Samples) -> dict[Document, Any]:
    """All filters have the same."""
    return {document: sample.answers for (document, _), sample in samples.items()}


def _by_score(samples: Samples) -> dict[Score, list[float]]:
    found: dict[Score, list[float]] = {}
    for ((task, _), used), sample in samples.items():
        for metric, value in sample.scores.items():
            found.setdefault((task, metric, used), []).append(value)
    return found
