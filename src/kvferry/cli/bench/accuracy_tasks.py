"""`kvferry bench accuracy --lm-eval`: two servers, the same tasks of lm-eval; a table or JSON, and a verdict."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.lm_eval import Evaluation
from kvferry.bench.accuracy.samples import TaskComparison, TaskRuns, task_faults
from kvferry.cli import console
from kvferry.cli.bench.accuracy import servers_of
from kvferry.cli.bench.command import AccuracyOptions
from kvferry.errors import ConfigurationError
from kvferry.extras import how_to_install

# What our router counts, and those that went through two engines.
REQUESTS, SPLIT = "kvferry_router_requests", {"path": "disaggregated", "status": "200"}
TIMEOUT_S = 10.0
NOTHING = "-"


def bench_tasks(options: AccuracyOptions) -> int:
    """Exit code 0 when the split answers as the whole does, as far as the limits say. Raises ConfigurationError."""
    if find_spec("lm_eval") is None:
        raise ConfigurationError("lm-eval is not installed", hint=how_to_install("lm-eval"))
    tasks = tuple(task for task in options.lm_eval.split(",") if task)
    evaluation = Evaluation(tasks, options.limit, options.arguments)
    evaluation.check()
    whole, split = asyncio.run(servers_of(options))
    runs = _runs(evaluation, whole, split, with_control=options.control)
    faults = list(task_faults(runs, options.min_equal))
    if options.as_json:
        console.data(_json(options, runs, faults))
    else:
        _show(runs, faults)
    return 1 if faults else 0


def _runs(evaluation: Evaluation, whole: Server, split: Server, *, with_control: bool) -> TaskRuns:
    salt = f"accuracy-{secrets.token_hex(4)}"
    console.say("lm-eval asks the whole server, one request at a time")
    baseline = evaluation.run(replace(whole, at_once=1, salt=f"{salt}-baseline"))
    control = None
    if with_control:
        console.say(f"lm-eval asks the whole server, {whole.at_once} requests at a time")
        control = TaskComparison(baseline, evaluation.run(replace(whole, salt=f"{salt}-control")))
    console.say(f"lm-eval asks the split, {split.at_once} requests at a time")
    before = asyncio.run(_num_split(split))
    found = evaluation.run(replace(split, salt=f"{salt}-split"))
    after = asyncio.run(_num_split(split))
    num_split = None if before is None or after is None else after - before
    return TaskRuns(baseline, TaskComparison(baseline, found, num_split), control)


async def _num_split(server: Server) -> int | None:
    """How many requests a router of ours has sent through two engines so far; None where there is no such router."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{server.url}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    except (aiohttp.ClientError, OSError, ValueError):
        return None
    requests = next((family for family in families if family.name == REQUESTS), None)
    if requests is None:
        return None
    counted = (sample for sample in requests.samples if SPLIT.items() <= sample.labels.items())
    return round(sum(sample.value for sample in counted if sample.name == f"{REQUESTS}_total"))


def _show(runs: TaskRuns, faults: list[str]) -> None:
    """A row for each score, a column for each run; then the verdict."""
    out = Console(highlight=False, markup=False)
    out.print(_table(runs))
    if faults:
        out.print("The split does not answer as the whole does:", style="bold red")
        for fault in faults:
            out.print(f"  {fault}", soft_wrap=True)
    else:
        out.print("The split answers as the whole does.", style="bold green")


def _table(runs: TaskRuns) -> Table:
    table = Table(title="Whole and split", title_justify="left", title_style="bold")
    for name in ("", "whole", "whole, in other batches", "split"):
        table.add_column(name, justify="right" if name else "left")
    compared = (runs.control, runs.split)

    def row(name: str, own: str, of: Callable[[TaskComparison], str]) -> None:
        table.add_row(name, own, *(of(run) if run is not None else NOTHING for run in compared))

    own = TaskComparison(runs.baseline, runs.baseline).scores
    row("documents", str(runs.split.num_compared), lambda run: str(run.num_compared))
    row("equal answers", NOTHING, lambda run: f"{run.num_compared - len(run.different)} of {run.num_compared}")
    for score, value in own.items():
        task, metric, used = score
        name = f"{task}: {metric}" if used == "none" else f"{task}: {metric} ({used})"
        row(name, f"{value:.4f}", lambda run, score=score: _number(run.scores.get(score)))  # type: ignore[misc]
    if runs.split.num_split is not None:
        row("went through a split", NOTHING, lambda run: NOTHING if run.num_split is None else str(run.num_split))
    return table


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _json(options: AccuracyOptions, runs: TaskRuns, faults: list[str]) -> dict[str, Any]:
    return {
        "url": options.url,
        "against": options.against,
        "tasks": options.lm_eval,
        "at_once": options.concurrency,
        "baseline": _scores(TaskComparison(runs.baseline, runs.baseline)),
        "split": _figures(runs.split),
        "control": _figures(runs.control) if runs.control else None,
        "faults": faults,
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
