"""`kvferry simulate fleet`: from options to runs, and what they print."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvferry.bench.load.workload import PlannedRequest, lengths_named, read_trace
from kvferry.bench.report.slo import Slo, slo_named
from kvferry.catalog import Options, read
from kvferry.cli import console
from kvferry.cli.plan.shape import link_of
from kvferry.cli.simulate.command import (
    MAX_DURATION_S,
    CacheOptions,
    EngineOptions,
    FleetOptions,
    LoadOptions,
    RouterOptions,
)
from kvferry.cli.simulate.facts import facts_of, ratio_facts
from kvferry.cli.simulate.page.html import page
from kvferry.cli.simulate.table import show, show_ratio
from kvferry.connectors.step_cost import step_cost_named
from kvferry.errors import ConfigurationError, choice_named
from kvferry.plan.description.model import CacheModel
from kvferry.router.config import PrefillFallback
from kvferry.router.policy.plugins import policy_named
from kvferry.router.policy.records import Limits
from kvferry.simulate.costs import (
    CacheSize,
    EngineCosts,
    PartOfTokens,
    beside_measured_prompts,
    points_named,
    points_of,
)
from kvferry.simulate.incidents import HotPrefix, incident_named, of_kind
from kvferry.simulate.load import Load, arrivals_of, check_fit
from kvferry.simulate.ratio import find_ratio
from kvferry.simulate.settings import Fleet, Routing, Setting, Times, Wires
from kvferry.simulate.simulation import simulate
from kvferry.simulate.summary import Report, report_of
from kvferry.system import os_error_text

# How long a run goes on after the last request of a trace.
END_OF_TRACE_S = 1.0
# No window, no chunk, and a token an entry: the last three of `State.token_limits`.
ALL_TOKENS_MOVE = (0, 0, 1)


def simulate_fleet(options: FleetOptions, typed: str) -> None:
    """Simulate and print; `typed` is the command line. Raises ConfigurationError."""
    file = console.page_file(options.page)
    planned = _planned(options.load)
    check_fit(planned, options.engines.cache_tokens)
    setting = _setting(options, planned)
    arrivals = arrivals_of(planned, of_kind(setting.incidents, HotPrefix), options.load.seed)
    with _router_silent(), console.stderr.status("simulating"):
        if options.find_ratio:
            best, tried = find_ratio(setting, arrivals, _say_tried)
            _print(options, ratio_facts(best, tried) | {"command": typed})
            return
        report = report_of(simulate(setting, arrivals))
    facts = facts_of(report) | {"command": typed}
    _print(options, facts)
    if file is not None:
        console.write_page(file, page(facts))


@contextmanager
def _router_silent() -> Iterator[None]:
    """Silence the router, which logs each instance that goes down, a thousand in a rollout: the figures say it."""
    router = logging.getLogger("kvferry.router")
    before = router.level
    router.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        router.setLevel(before)


def _print(options: FleetOptions, facts: dict[str, Any]) -> None:
    if options.as_json:
        console.data(facts)
    elif options.find_ratio:
        show_ratio(facts)
    else:
        show(facts)


def _say_tried(report: Report) -> None:
    if sys.stderr.isatty():
        console.say(f"{report.result.setting.fleet}: {report.figures.goodput:.3g} good requests/s")


def _planned(options: LoadOptions) -> tuple[PlannedRequest, ...]:
    if options.trace:
        try:
            with open(options.trace, encoding="utf-8-sig") as lines:
                return _short_enough(read_trace(lines, options.trace_speed))
        except (OSError, UnicodeDecodeError) as error:
            found = f"{options.trace}: {os_error_text(error)}"
            raise ConfigurationError("cannot read the trace", found=found, expected="a JSONL file") from None
    lengths = lengths_named(options.prompt_tokens), lengths_named(options.output_tokens)
    words = options.rate, options.duration, *lengths, options.seed, options.prefix_tokens, options.prefixes
    return Load(*words).requests()


def _short_enough(planned: tuple[PlannedRequest, ...]) -> tuple[PlannedRequest, ...]:
    """The requests of a trace. Raises ConfigurationError where they come for longer than --duration may be."""
    if not planned[-1].at_s <= MAX_DURATION_S:
        found, expected = f"{planned[-1].at_s:g} s", f"at most {MAX_DURATION_S:g} s"
        raise ConfigurationError("the trace is too long", found=found, expected=expected, hint="raise --trace-speed")
    return planned


def _setting(options: FleetOptions, planned: tuple[PlannedRequest, ...]) -> Setting:
    slo = replace(slo_named(options.slo), itl_by=options.itl_by) if options.slo else Slo()
    return Setting(
        fleet=Fleet(options.prefill, options.decode, options.per_rack),
        costs=_costs(options.engines),
        wires=_wires(options.cache),
        slo=slo,
        duration_s=planned[-1].at_s + END_OF_TRACE_S if options.load.trace else options.load.duration,
        incidents=tuple(incident_named(text) for text in options.incident),
        times=Times(
            start_up_s=options.engines.start_up,
            drain_s=options.engines.drain,
            silence_s=options.cache.silence,
            warm_up_s=options.load.warm_up,
        ),
        routing=_routing(options.router),
    )


def _costs(options: EngineOptions) -> EngineCosts:
    step = step_cost_named(options.step_cost)
    points = points_named(options.decode_steps) if options.decode_steps else points_of(step)
    return EngineCosts(
        token_s=1.0 / options.prefill_speed if options.prefill_speed else step.token_s,
        points=beside_measured_prompts(points) if options.prefill_speed else points,
        overlap=step.overlap,
        context_s=options.context_cost / 1e6,
        chunk_tokens=options.chunk_tokens,
        max_answers=options.max_sequences,
        cache_tokens=options.cache_tokens,
    )


def _wires(options: CacheOptions) -> Wires:
    if options.kv_bytes_per_token:
        size = CacheSize(options.kv_bytes_per_token)
    else:
        size = _size_of(read(options.model, Options("auto", False)).cache)
    uplink = link_of(options.uplink) if options.uplink else 0.0
    return Wires(size, link_of(options.link), uplink, options.handover_ms / 1e3)


def _size_of(model: CacheModel) -> CacheSize:
    """What moves of a model's cache, as `kvferry plan` reckons: states of which the same tokens move are one part."""
    limits: dict[tuple[int, int, int], list[int]] = {}
    for kept in model.kept():
        if kept.state.per_token:
            limits.setdefault(kept.state.token_limits[1:], []).append(kept.num_bytes)
    lasting = limits.pop(ALL_TOKENS_MOVE, [])
    parts = tuple(PartOfTokens(sum(sizes), *limit) for limit, sizes in limits.items())
    rows = len(lasting) + sum(len(sizes) for limit, sizes in limits.items() if limit[2] > 1)
    return CacheSize(float(sum(lasting)), model.fixed_bytes, rows, parts=parts)


def _routing(options: RouterOptions) -> Routing:
    fallbacks = {str(fallback): fallback for fallback in PrefillFallback}
    fallback = choice_named("--prefill-fallback", options.prefill_fallback, fallbacks)
    limits = Limits(ttft_s=options.ttft_slo, max_requests=options.max_requests)
    return Routing(policy_named(options.policy), limits, fallback)
