"""Options of `kvferry up`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import errors_as_messages
from kvferry.cli.engine_choice import check_engine, check_vllm, extras_of, size
from kvferry.cli.options import (
    Digest,
    Engine,
    Json,
    Model,
    Strategy,
    TransferDirection,
    Transport,
    cache,
    common,
    is_given,
    output,
)
from kvferry.errors import ConfigurationError


def up(
    context: typer.Context,
    model: Model = "tiny",
    engine: Engine = "transformers",
    prefill: Annotated[int, common(min=1, help="Number of prefill engines.")] = 1,
    decode: Annotated[int, common(min=1, help="Number of decode engines.")] = 1,
    transport: Transport = "auto",
    digest: Digest = "sampled",
    transfer_direction: TransferDirection = "auto",
    strategy: Strategy = "auto",
    once: Annotated[str | None, common(help="Answer this prompt and exit, with code 0 if the proof holds.")] = None,
    max_tokens: Annotated[int, common(min=1, help="Length of the answer in tokens.")] = 32,
    temperature: Annotated[
        float, output(min=0, max=2, help="Draw the answer's tokens at this temperature; 0 takes the likeliest.")
    ] = 0.0,
    seed: Annotated[int, output(min=0, max=2**31 - 1, help="Seed of the draws: the same one for both answers.")] = 0,
    prefill_block_tokens: Annotated[int, cache(min=4, help="Tokens per block, prefill engines.")] = 16,
    decode_block_tokens: Annotated[int, cache(min=4, help="Tokens per block, decode engines.")] = 16,
    cache_tokens: Annotated[int, cache(min=64, help="Cache size of each engine in tokens.")] = 16384,
    port: Annotated[int, common(min=0, max=65535, help="Port of the router; 0 picks a free one.")] = 8000,
    log_dir: Annotated[str, output(help="Folder for the logs of all processes, if not a temporary one.")] = "",
    as_json: Json = False,
) -> None:
    """Start prefill, decode and router on this machine, answer a prompt, prove the answer, and keep serving.

    With --engine vllm, everything after -- is passed to `vllm serve`, and vLLM's own defaults apply.
    """
    with errors_as_messages(extras_of(engine)):
        from kvferry.cli.up.job import UpOptions
        from kvferry.cli.up.job import up as run
        from kvferry.options import digest_policy_named, direction_named
        from kvferry.session.target.read_strategy import allowed_by
        from kvferry.transport.registry import check_name

        check_name(transport)
        digest_policy_named(digest)
        direction_named(transfer_direction)
        allowed_by(strategy)
        check_engine(engine, context)
        if engine == "vllm":
            check_vllm()
        if once == "":
            raise ConfigurationError("--once needs a prompt", found="an empty text")
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
            temperature=temperature,
            seed=seed,
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
