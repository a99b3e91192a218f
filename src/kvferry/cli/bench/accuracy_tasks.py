"""`kvferry bench accuracy --lm-eval`: two servers, the same tasks of lm-eval; a table or JSON, and a verdict."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.lm_eval import Evaluation, EvaluationError
from kvferry.bench.accuracy.samples import TaskComparison, TaskRuns, named, task_faults
from kvferry.bench.accuracy.verdict import remarks
from kvferry.cli import console, environment
from kvferry.cli.bench.accuracy import servers_of
from kvferry.cli.bench.accuracy_table import NOTHING, Verdict, number, part_of, runs_table, show_verdict
from kvferry.cli.bench.command import AccuracyOptions
from kvferry.cli.http_get import get
from kvferry.cli.scrape import reading_of
from kvferry.errors import ConfigurationError
from kvferry.extras import how_to_install

# What our router counts.
ROUTER, REQUESTS, LOST = "kvferry_router_ready", "kvferry_router_requests_total", "kvferry_router_lost_caches_total"
TIMEOUT_S = 10.0


def bench_tasks(options: AccuracyOptions) -> int:
    """Exit code 0 when the split answers as the whole does, as far as the limits say. Raises ConfigurationError."""
    if find_spec("lm_eval") is None:
        raise ConfigurationError("lm-eval is not installed", hint=how_to_install("lm-eval"))
    tasks = tuple(task for task in options.lm_eval.split(",") if task)
    evaluation = Evaluation(tasks, options.limit, options.arguments, environment.all_variables())
    evaluation.check()
    whole, split = asyncio.run(servers_of(options))
    with _ended_by_sigterm():
        runs = _runs(evaluation, whole, split, with_control=options.control)
    verdict = _verdict(runs, options.min_equal)
    if options.as_json:
        console.data(_json(options, runs) | verdict.as_json())
    else:
        _show(runs, verdict)
    return 1 if verdict.faults else 0


def _verdict(runs: TaskRuns, min_equal: float | None) -> Verdict:
    split = runs.split
    by_chance = len(runs.control.different) if runs.control else None
    said = remarks(len(split.different), split.num_compared, by_chance, split.num_split) if not runs.failure else ()
    return Verdict(list(task_faults(runs, min_equal)), list(said))


def _runs(evaluation: Evaluation, whole: Server, split: Server, *, with_control: bool) -> TaskRuns:
    salt = f"accuracy-{secrets.token_hex(4)}"
    console.say("lm-eval asks the whole server, one request at a time")
    baseline = evaluation.run(replace(whole, at_once=1, salt=f"{salt}-baseline"))
    control = None
    if with_control:
        console.say(f"lm-eval asks the whole server, {whole.at_once} requests at a time")
        control = TaskComparison(baseline, evaluation.run(replace(whole, salt=f"{salt}-control")))
    console.say(f"lm-eval asks the split, {split.at_once} requests at a time")
    before = _num_split(split)
    try:
        found = evaluation.run(replace(split, salt=f"{salt}-split"))
    except EvaluationError as error:
        return TaskRuns(baseline, TaskComparison(baseline, {}), control, str(error))
    # A router that does not answer any more has shown nothing. A request that lost its cache, and was then answered by
    # a decode engine alone, is among the lost ones only, so the difference may be below none.
    num_split = None if before is None else max(0, (_num_split(split) or before) - before)
    return TaskRuns(baseline, TaskComparison(baseline, found, num_split), control)


def _num_split(server: Server) -> int | None:
    """How many requests a router of ours has so far sent through two engines and not lost their caches; None where
    there is no such router."""
    try:
        reading = reading_of(get(f"{server.url}/metrics", TIMEOUT_S).decode(), 0.0)
    except (OSError, ValueError):
        return None
    if ROUTER not in reading.samples:
        return None
    return round(reading.total(REQUESTS, path="disaggregated", status="200") - reading.total(LOST))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Else the process that asks would go on, and its folder with our headers stay."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(runs: TaskRuns, verdict: Verdict) -> None:
    """A row for each score, a column for each run; then the verdict."""
    out = Console(highlight=False, markup=False, emoji=False)
    out.print(_table(runs))
    show_verdict(out, verdict)


def _table(runs: TaskRuns) -> Table:
    table = runs_table()
    compared = (runs.control, runs.split)

    def row(name: str, own: str, of: Callable[[TaskComparison], str]) -> None:
        table.add_row(name, own, *(of(run) if run is not None else NOTHING for run in compared))

    own = TaskComparison(runs.baseline, runs.baseline).scores
    row("documents", str(runs.split.num_compared), lambda run: str(run.num_compared))
    row("equal answers", NOTHING, lambda run: f"{run.num_compared - len(run.different)} of {run.num_compared}")
    for score, value in own.items():
        row(named(score), f"{value:.4f}", lambda run, score=score: number(run.scores.get(score)))  # type: ignore[misc]
    if runs.split.num_split is not None:
        asked = runs.split.num_requests
        row("went through a split", NOTHING, lambda run: part_of(run.num_split, asked))
    return table


def _json(options: AccuracyOptions, runs: TaskRuns) -> dict[str, Any]:
    return {
        "url": options.url,
        "against": options.against,
        "tasks": options.lm_eval,
        "at_once": options.concurrency,
        "baseline": _scores(TaskComparison(runs.baseline, runs.baseline)),
        "split": _figures(runs.split),
        "control": _figures(runs.control) if runs.control else None,
    }


def _figures(run: TaskComparison) -> dict[str, Any]:
    return {
        "compared": run.num_compared,
        "equal": run.num_compared - len(run.different),
        "different": [{"task": task, "doc_id": number} for task, number in run.different],
        "scores": _scores(run),
        "split": run.num_split,
    }


def _scores(run: TaskComparison) -> list[dict[str, Any]]:
    return [
        {"task": task, "metric": metric, "filter": used, "mean": value}
        for (task, metric, used), value in run.scores.items()
    ]
