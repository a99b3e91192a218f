"""Options of `kvferry up`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import typer

from kvferry.cli.console import errors_as_messages
from kvferry.cli.engine_choice import OTHER_ENGINES, check_engine, extras_of, left_to_engine, refuse_options
from kvferry.cli.options import (
    Engine,
    Json,
    Model,
    TransferOptions,
    cache,
    check_unused,
    command_of,
    common,
    is_given,
    output,
)
from kvferry.errors import ConfigurationError

on_ray = partial(typer.Option, rich_help_panel="Advanced: Ray")


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """Where the fleet is started: on this machine, or on a Ray cluster that is there."""

    on: Annotated[str, common(help="Where to start it: here, or ray, on a running Ray cluster.")] = "here"
    resources: Annotated[
        list[str], on_ray(help="What Ray reserves for each engine, such as GPU=1; repeatable. Default: CPU=1.")
    ] = field(default_factory=list)
    token_file: Annotated[str, on_ray(help="File with the shared token, on every node; else KVFERRY_TOKEN_FILE.")] = ""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What to start and what to ask. With `once`, a prompt, everything stops after its answer.

    vLLM has its own default for a number of tokens per block that is 0. `arguments` go to the servers of another engine
    as they are.
    """

    model: Model = "tiny"
    engine: Engine = "transformers"
    prefill: Annotated[int, common(min=1, help="Number of prefill engines.")] = 1
    decode: Annotated[int, common(min=1, help="Number of decode engines.")] = 1
    transfer: TransferOptions = field(default_factory=TransferOptions)
    once: Annotated[str | None, common(help="Answer this prompt and exit, with code 1 if the proof does not hold.")] = (
        None
    )
    max_tokens: Annotated[int, common(min=1, help="Length of the answer in tokens.")] = 32
    temperature: Annotated[
        float, output(min=0, max=2, help="Draw the answer's tokens at this temperature; 0 takes the likeliest.")
    ] = 0.0
    seed: Annotated[int, output(min=0, max=2**31 - 1, help="Seed of the draws: the same one for both answers.")] = 0
    prefill_block_tokens: Annotated[int, cache(min=4, help="Tokens per block, prefill engines.")] = 16
    decode_block_tokens: Annotated[int, cache(min=4, help="Tokens per block, decode engines.")] = 16
    device: Annotated[str, cache(help="Device that computes: cpu, cuda or xpu, with or without a number.")] = "cpu"
    cache_tokens: Annotated[int, cache(min=64, help="Cache size of each engine in tokens.")] = 16384
    place: PlaceOptions = field(default_factory=PlaceOptions)
    port: Annotated[int, common(min=0, max=65535, help="Port of the router; 0 picks a free one.")] = 8000
    log_dir: Annotated[str, output(help="Folder for the logs of all processes, if not a temporary one.")] = ""
    as_json: Json = False
    arguments: tuple[str, ...] = ()


@command_of(UpOptions)
def up(context: typer.Context, options: UpOptions) -> int:
    """Start prefill, decode and router on this machine, answer a prompt, prove the answer, and keep serving.

    With --engine vllm or sglang, everything after -- is passed to those servers, and their own defaults apply.
    """
    with errors_as_messages(extras_of(options.engine)):
        from kvferry.cli.up import job

        options.transfer.check()
        check_engine(options.engine, context)
        _check_place(context, options.place)
        if options.once == "":
            raise ConfigurationError("--once needs a prompt", found="an empty text")
        options = replace(options, arguments=tuple(context.args))
        if options.engine in OTHER_ENGINES:
            refuse_options(options.engine, context, "device")
        if options.engine == "vllm":
            options = replace(options, **left_to_engine(context, "prefill_block_tokens", "decode_block_tokens"))
        # One question needs no port that is known, so it does not take the usual one from another.
        if options.once is not None and not is_given(context, "port"):
            options = replace(options, port=0)
        return job.up(options)


def _check_place(context: typer.Context, place: PlaceOptions) -> None:
    """Raises ConfigurationError for an unknown place, and for options that have no effect there."""
    if place.on not in ("here", "ray"):
        raise ConfigurationError("unknown place for a fleet", found=place.on, expected="--on here, or --on ray")
    if place.on == "ray":
        check_unused(context, ("log_dir",), "beside --on ray: Ray keeps the logs")
    else:
        check_unused(context, ("resources", "token_file"), "without --on ray")
