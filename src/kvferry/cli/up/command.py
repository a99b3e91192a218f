"""Options of `kvferry up`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvferry.cli.console import friendly
from kvferry.cli.engine_choice import check_engine, check_vllm, extras_of, size
from kvferry.cli.options import (
    Digest,
    Engine,
    Json,
    Model,
    Strategy,
    TransferDirection,
    Transport,
    addresses,
    cache,
    output,
)
from kvferry.cli.typed import is_given
from kvferry.errors import ConfigurationError

__all__ = ["up"]

prompt = partial(typer.Option, rich_help_panel="The prompt that is answered")


def up(
    context: typer.Context,
    model: Model = "tiny",
    engine: Engine = "transformers",
    prefill: Annotated[int, cache(min=1, help="Number of prefill engines.")] = 1,
    decode: Annotated[int, cache(min=1, help="Number of decode engines.")] = 1,
    transport: Transport = "auto",
    digest: Digest = "sampled",
    transfer_direction: TransferDirection = "auto",
    strategy: Strategy = "auto",
    once: Annotated[
        str | None, prompt(help="Answer this prompt and stop; exit code 0 if the answers are equal.")
    ] = None,
    max_tokens: Annotated[int, prompt(min=1, help="Length of the answer.")] = 32,
    prefill_block_tokens: Annotated[int, cache(min=4, help="Block size of the prefill engines.")] = 16,
    decode_block_tokens: Annotated[int, cache(min=4, help="Block size of the decode engines.")] = 16,
    cache_tokens: Annotated[int, cache(min=64, help="Tokens that each engine's cache holds.")] = 16384,
    port: Annotated[int, addresses(min=0, max=65535, help="Port of the router.")] = 8000,
    log_dir: Annotated[str, output(help="Folder for the engines' output; a temporary one if empty.")] = "",
    as_json: Json = False,
) -> None:
    """Start prefill, decode and router on this machine, answer a prompt, prove it right, and keep serving.

    With --engine vllm, what follows -- goes to `vllm serve` as it is; the sizes are vLLM's unless given here.
    """
    with friendly(extras_of(engine)):
        from kvferry.cli.up.job import UpOptions
        from kvferry.cli.up.job import up as run
        from kvferry.plan.copies import direction_named
        from kvferry.plan.digest import policy_named
        from kvferry.session.ways import allowed_by
        from kvferry.transport.opening import check_name

        check_name(transport)
        policy_named(digest)
        direction_named(transfer_direction)
        allowed_by(strategy)
        check_engine(engine, context)
        if engine == "vllm":
            check_vllm()
        if once == "":
            raise ConfigurationError("a prompt needs a token", found="--once with an empty text")
        options = UpOptions(
            engine=engine,
            engine_arguments=tuple(context.args),
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            transport=transport,
            digest=digest,
            direction=transfer_direction,
            strategy=strategy,
            prompts=() if once is None else (once,),
            max_tokens=max_tokens,
            prefill_block_tokens=size(context, "prefill_block_tokens", engine),
            decode_block_tokens=size(context, "decode_block_tokens", engine),
            cache_tokens=cache_tokens,
            # One question needs no port that is known, so it does not take the usual one from another.
            port=port if once is None or is_given(context, "port") else 0,
            log_directory=log_dir,
            as_json=as_json,
        )
        code = run(options)
    raise typer.Exit(code)
