"""Options of `kvferry plan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from kvferry.cli.options import Json, check_unused, command_of, common, is_given, typed_words

engines = partial(typer.Option, rich_help_panel="Engines")
prompt = partial(typer.Option, rich_help_panel="Prompt")
named = partial(typer.Option, rich_help_panel="Model")
numbers = partial(typer.Option, rich_help_panel="Without --model")

MAX_TOKENS = 1 << 24
MAX_LAYERS = 1 << 12


def list_models(context: typer.Context, wanted: bool) -> None:
    """Print the names that `--model` knows, each with those of its models on the Hub, and exit."""
    if not wanted:
        return
    from kvferry import catalog
    from kvferry.cli import console

    if context.params["as_json"]:
        console.data({name: catalog.hub_names(name) for name in catalog.names()})
        raise typer.Exit
    width = max(map(len, catalog.names()))
    for name in catalog.names():
        first, *others = catalog.hub_names(name) or ("built on this machine",)
        typer.echo(f"{name:{width}}  {first}")
        for other in others:
            typer.echo(f"{'':{width}}  {other}")
    raise typer.Exit


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to plan: two engines in words (`tp=4,block=16`), a prompt, a link in words (`50GB/s`), and a model."""

    prefill: Annotated[str, engines(help="Shape of the prefill engine, such as tp=4,block=16.")]
    decode: Annotated[str, engines(help="Shape of the decode engine, such as tp=2.")]
    layout: Annotated[str, engines(help="Cache format of engines without format=.")] = "token-major"
    scattered: Annotated[bool, engines("--scattered", help="Block ids at random, as in a busy pool.")] = False
    link: Annotated[str, engines(help="Bandwidth per rank, such as 50GB/s or 400Gbit/s.")] = "50GB/s"
    prefill_speed: Annotated[float, engines(help="Prefill throughput in tokens/s.", show_default="estimated")] = 0.0
    tokens: Annotated[int, prompt(min=0, max=MAX_TOKENS, help="Prompt length in tokens.")] = 8192
    cached: Annotated[int, prompt(min=0, help="Prompt tokens that the decode engine has cached.")] = 0
    model: Annotated[str, named(help="Model name, config.json or its folder; else use the options below.")] = ""
    models: Annotated[
        bool,
        named("--models", callback=list_models, help="List the names that --model knows, and exit."),
    ] = False
    cache_dtype: Annotated[str, named(help="dtype of the cache; auto for the model's own.")] = "auto"
    draft: Annotated[bool, named("--draft", help="Include the model's draft (MTP) layers.")] = False
    assume_standard: Annotated[
        bool,
        named("--assume-standard", help="Plan although fields of the config are unknown that may change the cache."),
    ] = False
    layers: Annotated[int, numbers(min=1, max=MAX_LAYERS, help="Number of layers.")] = 32
    heads: Annotated[int, numbers(min=1, help="Number of KV heads.")] = 8
    head_dim: Annotated[int, numbers(min=1, help="Size of one head.")] = 128
    dtype: Annotated[str, numbers(help="dtype of the cache.")] = "bfloat16"
    html: Annotated[str, common(help="Write the plan as an HTML page.")] = ""
    as_json: Json = False


@command_of(PlanOptions)
def plan(context: typer.Context, options: PlanOptions) -> None:
    """Plan a cache transfer between two engines: what moves where, how, and how long it takes. Needs no hardware.

    The shape of an engine is a list with commas: tp=N, pp=N, dp=N,
    cp=N or dcp=N (with run=N tokens), block=N tokens, kernel=N (kernel
    blocks per block), format=NAME, outer=AXIS, pool=shared or separate.
    """
    from kvferry.cli.plan import report

    if options.model or is_given(context, "model"):
        check_unused(context, ("layers", "heads", "head_dim", "dtype"), "with --model")
        entry = report.model_of(options)
    else:
        check_unused(context, ("cache_dtype", "draft", "assume_standard"), "without --model")
        entry = report.model_of_numbers(options)
    if is_given(context, "prefill_speed"):
        report.check_speed(options.prefill_speed)
    report.plan(options, entry, typed_words(context, without=("html", "as_json")))
