"""Options of `kvferry simulate fleet`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from kvferry.bench.report.slo import ItlBy
from kvferry.cli.options import Json, check_unused, command_of, common, is_given, typed_words
from kvferry.errors import ConfigurationError

fleet_panel = partial(typer.Option, rich_help_panel="Fleet")
engines = partial(typer.Option, rich_help_panel="Engines")
cache = partial(typer.Option, rich_help_panel="Cache and network")
load = partial(typer.Option, rich_help_panel="Requests")
router = partial(typer.Option, rich_help_panel="Router")

DAY_S = 86_400.0
MAX_DURATION_S = 7 * DAY_S
MAX_PREFIX_TOKENS = 10_000_000

OF_POISSON = ("rate", "duration", "prompt_tokens", "output_tokens", "prefix_tokens", "prefixes")

app = typer.Typer(no_args_is_help=True, help="Simulate a fleet, without any hardware.")


@app.callback()
def simulate() -> None:
    """Simulate a fleet, without any hardware."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What engines can do. Times without a unit are in seconds."""

    step_cost: Annotated[
        str, engines(help="Cost of a step: token= of a prompt, step= each, sequence= of an answer, overlap=.")
    ] = "token=0.05ms,step=12ms,sequence=0.06ms,overlap=0"
    prefill_speed: Annotated[
        float, engines(min=0.0, max=1e9, help="Instead of token=: prompt tokens per second.", show_default=False)
    ] = 0.0
    decode_steps: Annotated[
        str, engines(help="Instead of step= and sequence=: measured steps by batch, such as 1=8ms,32=10ms.")
    ] = ""
    context_cost: Annotated[
        float,
        engines(
            min=0.0, max=1e6, help="Milliseconds that a step takes longer per 1,000 tokens of context in the batch."
        ),
    ] = 0.0
    chunk_tokens: Annotated[int, engines(min=1, help="Tokens that a step computes at most.")] = 2048
    max_sequences: Annotated[int, engines(min=1, help="Answers that an engine writes at a time.")] = 256
    cache_tokens: Annotated[int, engines(min=1, help="Tokens that the cache of an engine holds.")] = 1_000_000
    start_up: Annotated[float, engines(min=0.0, max=DAY_S, help="Seconds until a new engine is ready.")] = 30.0
    drain: Annotated[float, engines(min=0.0, max=DAY_S, help="Seconds that an engine may drain in a rollout.")] = 30.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What moves, and over what."""

    model: Annotated[str, cache(help="Model name, config.json or its folder, as for kvferry plan.")] = "llama-3.3-70b"
    kv_bytes_per_token: Annotated[
        float, cache(min=0.0, max=1e9, help="Instead of --model: bytes of cache per token.", show_default=False)
    ] = 0.0
    link: Annotated[str, cache(help="Bandwidth of an engine, such as 50GB/s or 400Gbit/s.")] = "50GB/s"
    uplink: Annotated[str, cache(help="Bandwidth of a rack in each direction; empty: that of its engines.")] = ""
    handover_ms: Annotated[
        float, cache(min=0.0, max=1e6, help="Milliseconds of messages from a computed prompt to its transfer.")
    ] = 10.0
    silence: Annotated[
        float, cache(min=0.0, max=DAY_S, help="Seconds until an engine gives up a source that says nothing.")
    ] = 3.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which requests come."""

    rate: Annotated[float, load(min=0.0, max=1e6, help="Requests per second (Poisson process).")] = 10.0
    duration: Annotated[float, load(min=0.0, max=MAX_DURATION_S, help="Seconds in which requests come.")] = 120.0
    warm_up: Annotated[float, load(min=0.0, max=MAX_DURATION_S, help="Seconds at the beginning that do not count.")] = (
        10.0
    )
    prompt_tokens: Annotated[str, load(help="Prompt length in tokens: 512, or 256-1024.")] = "512-3584"
    output_tokens: Annotated[str, load(help="Answer length in tokens: 64, or 16-128.")] = "64-448"
    prefix_tokens: Annotated[
        int, load(min=0, max=MAX_PREFIX_TOKENS, help="Tokens of a shared prefix before each prompt.")
    ] = 0
    prefixes: Annotated[int, load(min=1, help="Number of different prefixes.")] = 1
    trace: Annotated[str, load(help="Instead of --rate: replay a JSONL trace in Mooncake's format.")] = ""
    trace_speed: Annotated[float, load(min=0.0, max=1e6, help="Factor by which the trace is sped up.")] = 1.0
    seed: Annotated[int, load(help="Seed of arrival times and lengths.")] = 0


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How the router chooses: options of `kvferry route`."""

    policy: Annotated[str, router(help="balanced, an entry point's name, or module:function.")] = "balanced"
    prefill_fallback: Annotated[
        str, router(help="Without a prefill engine: decode computes the prompt, or refuse.")
    ] = "decode"
    max_requests: Annotated[int, router(min=0, help="Open requests per decode engine; 0: no limit.")] = 0
    ttft_slo: Annotated[
        float,
        router(min=0.0, max=DAY_S, help="Refuse requests whose first token would take longer, in seconds; 0: never."),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A fleet, what its engines cost, what is asked of it and what happens to it."""

    prefill: Annotated[int, fleet_panel(min=0, help="Prefill engines; without any, the others do everything.")] = 4
    decode: Annotated[int, fleet_panel(min=1, help="Decode engines.")] = 12
    per_rack: Annotated[int, fleet_panel(min=1, help="Engines in a rack, of both roles.")] = 16
    slo: Annotated[str, common(help="Latency limits of an answer: ttft=5s,itl=100ms,e2el=30s.")] = "ttft=2s,itl=50ms"
    itl_by: Annotated[ItlBy, common(help="ITL of a request: the mean or the p99 of its gaps.")] = ItlBy.MEAN
    incident: Annotated[
        list[str],
        common(
            help="What happens, at seconds from the start; repeatable: 'rack 3 dies at 60', 'rack 3 dies from 60 to "
            "120', 'link of rack 2 at 10% from 60 to 120', 'rollout from 60 by 4', 'hot prefix 40% of 1024 tokens from "
            "60'."
        ),
    ] = field(default_factory=list)
    find_ratio: Annotated[
        bool, common("--find-ratio", help="Find the number of prefill engines with the highest goodput.")
    ] = False
    page: Annotated[str, common(help="Write an HTML page with the course of the run.")] = ""
    as_json: Json = False
    engines: EngineOptions = field(default_factory=EngineOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    router: RouterOptions = field(default_factory=RouterOptions)


@app.command()
@command_of(FleetOptions, "simulate")
def fleet(context: typer.Context, options: FleetOptions) -> None:
    """Simulate a fleet: the router's real policy, pool and breakers, with engines and links that are modelled.

    Prints goodput, latencies, and what is the scarcest. What the engines cost is a guess unless you say it:
    measure yours with kvferry bench serve.
    """
    _check(context, options)
    from kvferry.cli.simulate import fleet as command

    command.simulate_fleet(options, typed_words(context, without=("page", "as_json")))


def _check(context: typer.Context, options: FleetOptions) -> None:
    """Raises ConfigurationError for options that do not go together, or do nothing."""
    if is_given(context, "model") and is_given(context, "kv_bytes_per_token"):
        found, expected = "--model and --kv-bytes-per-token", "one of them"
        raise ConfigurationError("these options exclude each other", found=found, expected=expected)
    if options.load.trace:
        check_unused(context, OF_POISSON, "with --trace")
    else:
        check_unused(context, ("trace_speed",), "without --trace")
    if not options.slo:
        check_unused(context, ("itl_by",), "without --slo")
    if options.find_ratio:
        check_unused(context, ("incident", "page"), "with --find-ratio")
