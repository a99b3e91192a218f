"""`kvferry bench serve`: load for a server, a table or JSON, and a page."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.progress import Progress, TaskID, TextColumn

from kvferry.bench.load.generator import run_load
from kvferry.bench.load.target import Target, served_model
from kvferry.bench.load.workload import (
    PlannedRequest,
    Synthetic,
    lengths_named,
    poisson,
    rates_named,
    read_trace,
    renamed,
    synthetic,
)
from kvferry.bench.report.figures import Report, best_of, report_of
from kvferry.bench.report.page import page
from kvferry.bench.report.record import Record
from kvferry.bench.report.slo import Slo, slo_named
from kvferry.cli import console, environment
from kvferry.cli.bench.command import BenchOptions, base_of
from kvferry.cli.bench.progress import BenchProgress
from kvferry.cli.bench.table import show
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

# A load generator that is later than this measures itself instead of the server.
LATE_MS = 50.0

# RFC 9110's tokens.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Plans = list[tuple[float, tuple[PlannedRequest, ...]]]
"""The rate in requests/s and the requests of each run."""


def headers_named(words: list[str]) -> dict[str, str]:
    """The headers of words `Name: value`, with the environment's API key if none has one. Raises ConfigurationError."""
    headers = {}
    for word in words:
        name, colon, value = word.partition(":")
        if not (colon and HEADER_NAME.fullmatch(name.strip()) and word.isprintable()):
            raise ConfigurationError("invalid --header", found=word, expected="such as 'X-Tenant: blue'")
        headers[name.strip()] = value.strip()
    has_key = any(name.lower() == "authorization" for name in headers)
    keys = () if has_key else environment.api_keys()
    return headers | dict(("Authorization", f"Bearer {key}") for key in keys)


def bench_serve(options: BenchOptions) -> int:
    """Run the load and return the exit code: 0, or 1 when no request was answered. Raises ConfigurationError."""
    plot, plans = console.page_file(options.plot), _plans(options)
    slo = slo_named(options.slo, options.itl_by) if options.slo else Slo(itl_by=options.itl_by)
    try:
        target, reports = asyncio.run(_run(options, plans, slo))
    except KeyboardInterrupt:
        console.say("interrupted: partial results are not reported")
        raise
    if options.as_json:
        console.data(_json(options, target, reports))
    else:
        show(reports, options.attainment)
    if plot is not None:
        console.write_page(plot, page(f"{target.model} at {target.url}", reports))
    return 0 if any(report.answered for report in reports) else 1


def _plans(options: BenchOptions) -> Plans:
    """One run per rate, or one for a trace or with so many requests in flight.

    Runs have the same arrivals and lengths, and each has prompts of its own: a server with a prefix cache would not
    compute what it had in an earlier run.
    """
    lengths = lengths_named(options.prompt_tokens), lengths_named(options.output_tokens)
    load = Synthetic(options.requests, *lengths, options.seed, options.prefix_tokens, options.prefixes)
    rates = rates_named(options.sweep) if options.sweep else (options.rate,)
    if options.trace:
        return [(math.inf, _read(options.trace, options.trace_speed))]
    runs = [(rate, synthetic(load, poisson(load.num_requests, rate, load.seed))) for rate in rates]
    return [(rate, renamed(planned, f"run/{number}")) for number, (rate, planned) in enumerate(runs)]


def _read(path: str, speed: float) -> tuple[PlannedRequest, ...]:
    try:
        with open(path, encoding="utf-8-sig") as lines:
            return read_trace(lines, speed)
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path}: {os_error_text(error)}"
        raise ConfigurationError("cannot read the trace", found=found, expected="a JSONL file") from None


async def _run(options: BenchOptions, plans: Plans, slo: Slo) -> tuple[Target, tuple[Report, ...]]:
    url, headers = base_of(options.url), headers_named(options.header)
    model = await served_model(url, options.model, headers)
    target = Target(url, model, options.endpoint, options.text, options.may_stop, headers)
    await _warm_up(options, target, plans[0][1])
    reports = []
    with BenchProgress(TextColumn("{task.fields[errors]} errors")) as progress:
        for rate, planned in plans:
            words = f"{rate:g} requests/s" if math.isfinite(rate) else "load"
            count = _counter(progress, progress.add_task(words, total=len(planned), errors=0))
            outcome = await run_load(target, planned, options.concurrency, options.timeout, count)
            reports.append(report_of(outcome.records, outcome.duration_s, rate, outcome.most_open, slo))
            _warn(reports[-1])
    return target, tuple(reports)


async def _warm_up(options: BenchOptions, target: Target, planned: tuple[PlannedRequest, ...]) -> None:
    """Send a few requests of the same lengths first. Raises ConfigurationError when the server answers none of them."""
    if not options.warm_up:
        return
    # Its prompts are its own: the first measured requests must not find them in a prefix cache.
    planned = renamed(planned[: options.warm_up], "warm-up")
    outcome = await run_load(target, planned, 1, options.timeout, _ignore)
    if all(record.error for record in outcome.records):
        raise ConfigurationError(
            "the warm-up request failed",
            found=outcome.records[0].error,
            expected=f"a streamed answer of {target.endpoint.path}",
            hint="try shorter prompts, --text (no token ids in the request) or --may-stop (no ignore_eos)",
        )


def _ignore(record: Record) -> None:
    """Do nothing, as nobody watches a warm-up."""


def _warn(report: Report) -> None:
    late = report.times_s["late"]
    if late is not None and late.p99 * 1000 > LATE_MS:
        late_ms = f"{late.p99 * 1000:.0f} ms"
        console.say(f"warning: requests were sent up to {late_ms} late (p99): this machine is too slow or busy")


def _counter(progress: Progress, task: TaskID) -> Callable[[Record], None]:
    """Return a function that counts a request that has ended, on a line of the display."""

    def count(record: Record) -> None:
        errors = progress.tasks[task].fields["errors"] + bool(record.error)
        progress.update(task, advance=1, errors=errors)

    return count


def _json(options: BenchOptions, target: Target, reports: tuple[Report, ...]) -> dict[str, Any]:
    """The JSON output: the figures of one run, or those of each run under `sweep` and, with limits, the best of all."""
    facts: dict[str, Any] = {
        "model_id": target.model,
        "url": target.url,
        "endpoint": target.endpoint.path,
        "max_concurrency": options.concurrency or None,
        "trace": options.trace or None,
        "seed": options.seed,
    }
    runs = [report.as_json(options.every_request) for report in reports]
    if len(runs) == 1:
        return facts | runs[0]
    best = asdict(best_of(reports, options.attainment)) if reports[0].slo.is_limited else {}
    return facts | best | {"sweep": runs}
