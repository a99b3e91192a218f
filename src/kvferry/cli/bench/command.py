"""Options of the commands of `kvferry bench`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvferry.bench.endpoint import Endpoint
from kvferry.bench.slo import ItlBy
from kvferry.cli.console import friendly
from kvferry.cli.options import Json, output
from kvferry.cli.typed import is_given
from kvferry.errors import ConfigurationError

__all__ = ["app"]

server = partial(typer.Option, rich_help_panel="Server")
arrivals = partial(typer.Option, rich_help_panel="When requests arrive")
asked = partial(typer.Option, rich_help_panel="What is asked")
good = partial(typer.Option, rich_help_panel="What is good enough")

# What one option does without another: nothing.
NEEDS = {
    "trace_speed": "trace",
    "every_request": "as_json",
    "attainment": "sweep",
    "itl_by": "slo",
    "prefixes": "prefix_tokens",
}

app = typer.Typer(no_args_is_help=True, help="Measure a running server.")


@app.callback()
def bench() -> None:
    """Measure a running server."""


@app.command()
def serve(
    context: typer.Context,
    url: Annotated[str, server(help="The server's URL, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, server(help="Model to ask for; the first one served if empty.")] = "",
    endpoint: Annotated[Endpoint, server(help="completions or chat.")] = Endpoint.COMPLETIONS,
    header: Annotated[list[str], server(help="'Name: value' for every request; repeat for more.")] = [],  # noqa: B006
    timeout: Annotated[float, server(min=0.1, help="Seconds that one answer may take.")] = 600.0,
    rate: Annotated[float, arrivals(help="Requests/s that arrive at random; inf: all at once.")] = float("inf"),
    concurrency: Annotated[int, arrivals(min=0, help="Instead: so many open at a time.")] = 0,
    trace: Annotated[str, arrivals(help="Instead: a JSONL file as Mooncake's traces.")] = "",
    trace_speed: Annotated[float, arrivals(help="So much faster than it was recorded.")] = 1.0,
    sweep: Annotated[str, arrivals(help="Instead: several rates, such as 1,2,4,8.")] = "",
    requests: Annotated[int, asked(min=1, help="Number of requests.")] = 100,
    prompt_tokens: Annotated[str, asked(help="Length of prompts: 512, or 256-1024.")] = "512",
    output_tokens: Annotated[str, asked(help="Length of answers: 64, or 16-128.")] = "64",
    prefix_tokens: Annotated[int, asked(min=0, help="Tokens of a shared beginning before each prompt.")] = 0,
    prefixes: Annotated[int, asked(min=1, help="How many different beginnings.")] = 1,
    text: Annotated[bool, asked("--text", help="Prompts of words, not of token ids.")] = False,
    may_stop: Annotated[bool, asked("--may-stop", help="Answers may end before their length.")] = False,
    warm_up: Annotated[int, asked(min=0, help="Requests before, one by one, that do not count.")] = 1,
    seed: Annotated[int, asked(help="The same seed asks the same at the same times.")] = 0,
    slo: Annotated[str, good(help="What a good answer is: ttft=5s,itl=100ms,e2el=30s.")] = "",
    itl_by: Annotated[ItlBy, good(help="A request's ITL is its mean, or the p99 of its gaps.")] = ItlBy.MEAN,
    attainment: Annotated[float, good(min=0.0, max=1.0, help="Part that must be good, for --sweep.")] = 0.9,
    plot: Annotated[str, output(help="Draw distributions and timeline as a page in this file.")] = "",
    as_json: Json = False,
    every_request: Annotated[bool, output("--every-request", help="In JSON, also each request's times.")] = False,
) -> None:
    """Load an OpenAI server and say how fast it answers, and how many answers are within the limits.

    Requests do not wait for the answers of earlier ones, except with --concurrency.
    """
    with friendly("router"):
        from kvferry.bench.lengths import lengths_named
        from kvferry.bench.slo import Slo, slo_named
        from kvferry.bench.sweep import rates_named
        from kvferry.bench.workload import Synthetic
        from kvferry.cli.bench import serve as bench

        _check(context)
        lengths = lengths_named(prompt_tokens), lengths_named(output_tokens)
        load = Synthetic(requests, *lengths, seed, prefix_tokens, prefixes)
        rates = rates_named(sweep) if sweep else (rate,)
        code = bench.bench_serve(
            bench.BenchOptions(
                server=bench.Server(url, model, endpoint, text, may_stop, bench.headers_named(header)),
                arrival=bench.Arrival(rates, concurrency, trace, trace_speed),
                load=load,
                slo=slo_named(slo, itl_by) if slo else Slo(itl_by=itl_by),
                attainment=attainment,
                warm_up=warm_up,
                timeout_s=timeout,
                output=bench.Output(as_json, every_request, plot),
            )
        )
    raise typer.Exit(code)


def _check(context: typer.Context) -> None:
    """Raises ConfigurationError for options that do not go together, or do nothing."""
    ways = [f"--{name}" for name in ("rate", "concurrency", "trace", "sweep") if is_given(context, name)]
    if len(ways) > 1:
        raise ConfigurationError("requests can arrive in one way only", found=" and ".join(ways), expected="one")
    for name, needed in NEEDS.items():
        if is_given(context, name) and not context.params[needed]:
            found, expected = (f"--{each.removeprefix('as_').replace('_', '-')}" for each in (name, needed))
            raise ConfigurationError("this has no effect by itself", found=found, expected=f"{expected} beside it")
