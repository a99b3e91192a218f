"""Options of the commands of `kvferry bench`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Annotated

import typer

from kvferry.bench.load.workload import Endpoint
from kvferry.bench.report.slo import ItlBy
from kvferry.cli.bench.same_server import is_same_server
from kvferry.cli.options import Json, check_unused, command_of, common, is_given, option_of
from kvferry.errors import ConfigurationError

server = partial(typer.Option, rich_help_panel="Server")
arrivals = partial(typer.Option, rich_help_panel="Arrival of requests")
asked = partial(typer.Option, rich_help_panel="Requests")
good = partial(typer.Option, rich_help_panel="Limits")

DAY_S = 86400.0
NOT_BESIDE_TRACE = ("requests", "prompt_tokens", "output_tokens", "prefix_tokens", "prefixes", "seed")
NOT_BESIDE_LM_EVAL = ("prompts", "max_tokens", "score_tokens", "factor", "plot")
# What one option does without another: nothing.
NEEDS = (
    ("trace_speed", "trace"),
    ("every_request", "as_json"),
    ("attainment", "sweep"),
    ("attainment", "slo"),
    ("itl_by", "slo"),
    ("prefixes", "prefix_tokens"),
)


def base_of(url: str) -> str:
    """The URL of a server without `/v1`, which people may have copied."""
    return url.rstrip("/").removesuffix("/v1")


app = typer.Typer(no_args_is_help=True, help="Measure a running server.")


@app.callback()
def bench() -> None:
    """Measure a running server."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to ask of which server, when, and what to tell of it. Time limits are in seconds."""

    url: Annotated[str, server(help="URL of the server, without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str, server(help="Model name, if not the first one that is served.")] = ""
    endpoint: Annotated[Endpoint, server(help="API to send requests to.")] = Endpoint.COMPLETIONS
    header: Annotated[
        list[str], server(help="'Name: value', sent with every request; repeatable. API key: KVFERRY_API_KEY.")
    ] = field(default_factory=list)
    timeout: Annotated[float, server(min=0.1, max=DAY_S, help="Time limit of one request, in seconds.")] = 600.0
    rate: Annotated[float, arrivals(help="Requests per second (Poisson process); inf sends all at once.")] = inf
    concurrency: Annotated[int, arrivals(min=0, help="Instead of --rate: number of requests in flight.")] = 0
    trace: Annotated[str, arrivals(help="Instead of --rate: replay a JSONL trace in Mooncake's format.")] = ""
    trace_speed: Annotated[float, arrivals(help="Factor by which the trace is sped up.")] = 1.0
    sweep: Annotated[str, arrivals(help="Instead of --rate: one run per rate, such as 1,2,4,8.")] = ""
    requests: Annotated[int, asked(min=1, help="Number of requests.")] = 100
    prompt_tokens: Annotated[str, asked(help="Prompt length in tokens: 512, or 256-1024.")] = "512"
    output_tokens: Annotated[str, asked(help="Answer length in tokens: 64, or 16-128.")] = "64"
    prefix_tokens: Annotated[int, asked(min=0, help="Tokens of a shared prefix before each prompt.")] = 0
    prefixes: Annotated[int, asked(min=1, help="Number of different prefixes.")] = 1
    text: Annotated[bool, asked("--text", help="Send prompts as text, not as token ids.")] = False
    may_stop: Annotated[bool, asked("--may-stop", help="Let answers end before their length (no ignore_eos).")] = False
    warm_up: Annotated[int, asked(min=0, help="Warm-up requests, sent one by one and not counted.")] = 1
    seed: Annotated[int, asked(help="Seed of prompts and arrival times.")] = 0
    slo: Annotated[str, good(help="Latency limits of an answer: ttft=5s,itl=100ms,e2el=30s.")] = ""
    itl_by: Annotated[ItlBy, good(help="ITL of a request: the mean or the p99 of its gaps.")] = ItlBy.MEAN
    attainment: Annotated[
        float, good(min=0.0, max=1.0, help="Share of requests that must meet --slo, for --sweep.")
    ] = 0.9
    plot: Annotated[str, common(help="Write an HTML page with distributions and a timeline.")] = ""
    as_json: Json = False
    every_request: Annotated[
        bool, common("--every-request", help="Include the times of every request in the JSON.")
    ] = False


@app.command()
@command_of(BenchOptions, "router")
def serve(context: typer.Context, options: BenchOptions) -> int:
    """Send load to an OpenAI server and report latency, throughput and goodput.

    Requests are sent without waiting for earlier answers, except with --concurrency.
    """
    from kvferry.cli.bench.serve import bench_serve

    _check(context)
    return bench_serve(options)


@dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """Which servers to ask what, and how far they may be apart. Time limits are in seconds."""

    url: Annotated[str, server(help="URL of the split: a router, without /v1.")] = "http://127.0.0.1:8000"
    against: Annotated[str, server(help="URL of one server that does everything.")] = ""
    model: Annotated[str, server(help="Model name, if not the first one that is served.")] = ""
    header: Annotated[
        list[str], server(help="'Name: value', sent with every request; repeatable. API key: KVFERRY_API_KEY.")
    ] = field(default_factory=list)
    timeout: Annotated[float, server(min=0.1, max=DAY_S, help="Time limit of one request, in seconds.")] = 600.0
    prompts: Annotated[
        str, asked(help="JSONL file: prompt, name, reference, answer. Without it, those of kvferry.")
    ] = ""
    lm_eval: Annotated[
        str, asked(help="Instead of prompts: tasks of lm-eval, with commas; options of lm-eval come after --.")
    ] = ""
    limit: Annotated[int, asked(min=0, help="Number of prompts, spread over the file; 0 takes all.")] = 0
    max_tokens: Annotated[int, asked(min=1, help="Length of an answer in tokens.")] = 32
    score_tokens: Annotated[int, asked(min=0, help="Tokens of each reference to score, spread over it.")] = 4
    concurrency: Annotated[int, asked(min=1, help="Requests in flight, except for the baseline's.")] = 4
    control: Annotated[
        bool, good("--control/--no-control", help="Ask the whole server twice, to know what batches alone change.")
    ] = True
    factor: Annotated[
        float, good(min=1.0, help="Largest mean difference of log-probabilities, in those of the control.")
    ] = 2.0
    min_equal: Annotated[
        float | None, good(min=0.0, max=1.0, help="Share of answers that must be equal, token for token.")
    ] = None
    plot: Annotated[str, common(help="Write an HTML page with the differences.")] = ""
    as_json: Json = False
    arguments: tuple[str, ...] = ()


@app.command(context_settings={"allow_extra_args": True})
@command_of(AccuracyOptions, "router")
def accuracy(context: typer.Context, options: AccuracyOptions) -> int:
    """Compare the answers of a split with those of one server that does everything.

    Both get the same prompts, at temperature 0. The whole server is asked twice, in different batches: what that
    changes is the measure of what the split may. Exit code 1 if it changes more.
    """
    _check_accuracy(context, options)
    if options.lm_eval:
        from kvferry.cli.bench.accuracy_tasks import bench_tasks

        return bench_tasks(replace(options, arguments=tuple(context.args)))
    from kvferry.cli.bench.accuracy import bench_accuracy

    return bench_accuracy(options)


def _check_accuracy(context: typer.Context, options: AccuracyOptions) -> None:
    """Raises ConfigurationError for what would compare nothing."""
    one = "the URL of one server with the same model that does everything"
    if not options.against:
        raise ConfigurationError("--against is missing", expected=one)
    if is_same_server(base_of(options.against), base_of(options.url)):
        raise ConfigurationError("--url and --against are the same server", found=options.url, expected=one)
    if options.lm_eval:
        check_unused(context, NOT_BESIDE_LM_EVAL, "beside --lm-eval")
    elif context.args:
        found, hint = " ".join(context.args), "options of lm-eval need --lm-eval TASK"
        raise ConfigurationError("these arguments mean nothing here", found=found, hint=hint)
    if not options.control and options.min_equal is None:
        raise ConfigurationError(
            "--no-control leaves nothing to judge by", hint="add --min-equal, or leave out --no-control"
        )
    if not options.control and is_given(context, "factor"):
        raise ConfigurationError("--factor has no effect with --no-control", hint="leave one of them out")


def _check(context: typer.Context) -> None:
    """Raises ConfigurationError for options that do not go together, or do nothing."""
    modes = [f"--{name}" for name in ("rate", "concurrency", "trace", "sweep") if is_given(context, name)]
    if len(modes) > 1:
        raise ConfigurationError("these options exclude each other", found=" and ".join(modes), expected="one of them")
    if context.params["trace"]:
        check_unused(context, NOT_BESIDE_TRACE, "beside --trace")
    for name, needed in NEEDS:
        if is_given(context, name) and not context.params[needed]:
            found, expected = option_of(name), option_of(needed)
            raise ConfigurationError(
                f"{found} has no effect without {expected}", hint=f"add {expected}, or leave {found} out"
            )
