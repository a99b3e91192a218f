"""Options of `kvferry serve`, for the built-in engine and for vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import friendly
from kvferry.cli.engine_choice import check_engine, check_vllm, extras_of, size
from kvferry.cli.options import (
    HERE,
    Child,
    Digest,
    Drain,
    Engine,
    FailurePolicy,
    Host,
    Json,
    Model,
    Strategy,
    TokenFile,
    TransferDirection,
    Transport,
    addresses,
    cache,
    moving,
    routers,
    times,
)
from kvferry.cli.serve.joining import JoinOptions
from kvferry.cli.typed import is_given
from kvferry.errors import ConfigurationError
from kvferry.registration import Side

__all__ = ["serve"]


def serve(
    context: typer.Context,
    model: Model = "tiny",
    engine: Engine = "transformers",
    engine_id: Annotated[str, cache(help="Name of this engine in references and metrics.")] = "engine-0",
    served_name: Annotated[str, cache(help="Model name in the API; the model's own if empty.")] = "",
    dtype: Annotated[str, cache(help="Torch dtype, or auto for the model's own.")] = "auto",
    block_tokens: Annotated[int, cache(min=4, help="Tokens per block.")] = 16,
    num_blocks: Annotated[int, cache(min=1, help="Blocks of the cache.")] = 1024,
    max_batch_tokens: Annotated[int, cache(min=1, help="Tokens per step; longer prompts go in chunks.")] = 512,
    simulated_step: Annotated[
        str, cache(help="Let steps last as another model's: token=1.2ms,step=50ms (docs/bench.md).")
    ] = "",
    transport: Transport = "auto",
    strategy: Strategy = "auto",
    staging_mib: Annotated[int, moving(min=1, help="MiB of staging memory (docs/staging.md).")] = 384,
    transfer_direction: TransferDirection = "auto",
    layer_wise: Annotated[
        bool, moving("--layer-wise", help="A prefill engine pushes early legs layer by layer (docs/staging.md).")
    ] = False,
    digest: Digest = "sampled",
    failure_policy: Annotated[
        FailurePolicy, moving(help="When a cache does not arrive: recompute or fail.")
    ] = FailurePolicy.RECOMPUTE,
    host: Host = HERE,
    port: Annotated[int, addresses(min=0, max=65535, help="HTTP port; 0 for any free one.")] = 8100,
    transfer_host: Annotated[str, addresses(help="Where peers reach it; beyond this host with a token.")] = HERE,
    transfer_port: Annotated[int, addresses(min=0, max=65535, help="Port of the control channel.")] = 0,
    token_file: TokenFile = "",
    lease_timeout: Annotated[float, times(min=0.1, help="How long a cache waits for its reader.")] = 30.0,
    heartbeat: Annotated[float, times(min=0.05, help="A peer silent for three is lost.")] = 1.0,
    drain_timeout: Drain = 30.0,
    register: Annotated[list[str], routers(help="URL of a router to join; repeat for more.")] = [],  # noqa: B006
    role: Annotated[list[Side], routers(help="What it joins as: prefill or decode; or both.")] = [],  # noqa: B006
    advertise_url: Annotated[str, routers(help="URL under which routers reach it, if not --host.")] = "",
    as_json: Json = False,
    as_child: Child = False,
) -> None:
    """Serve one model; it can prefill for others and decode what others prefilled.

    With --engine vllm, what follows -- goes to `vllm serve` as it is.
    """
    with friendly(extras_of(engine)):
        from kvferry.cli.models import resolve
        from kvferry.plan.copies import direction_named, may_turn
        from kvferry.plan.digest import policy_named
        from kvferry.transport.opening import check_name

        check_name(transport)
        policy, direction = policy_named(digest), direction_named(transfer_direction)
        check_engine(engine, context)
        join = JoinOptions(tuple(register), tuple(role), advertise_url)
        if engine == "vllm":
            check_vllm()
            path, name = resolve(model)
            _serve_vllm(context, path, served_name or name, join)
        from kvferry.agent import AgentConfig, read_token, staging_named
        from kvferry.cli import environment
        from kvferry.connectors.jobs import Settings
        from kvferry.connectors.step_cost import step_cost_named
        from kvferry.session.events import Timing

        if lease_timeout < 2 * heartbeat:
            found, expected = f"{lease_timeout:g} s", f"at least twice --heartbeat, which is {heartbeat:g} s"
            raise ConfigurationError("a lease ends before its reader's next word", found=found, expected=expected)
        timing = Timing(lease_s=lease_timeout, heartbeat_s=heartbeat)
        token = read_token(token_file or environment.token_file())
        agent = AgentConfig(
            engine_id,
            host=transfer_host,
            port=transfer_port,
            transport=transport,
            timing=timing,
            token=token,
            digest=policy,
            direction=direction,
            may_turn=may_turn(transfer_direction),
            staging_bytes=staging_mib << 20,
            staging=staging_named(strategy, staging_mib << 20),
        )
        step_cost = step_cost_named(simulated_step)
        # Both load torch, which takes seconds: what is wrong with the options has been told by then.
        path, name = resolve(model)
        from kvferry.cli.serve import embedded

        settings = Settings(
            *(path, dtype, block_tokens, num_blocks, max_batch_tokens), step_cost=step_cost, layer_wise=layer_wise
        )

        embedded.serve(
            embedded.ServeOptions(
                settings=settings,
                agent=agent,
                served_name=served_name or name,
                failure_policy=failure_policy,
                host=host,
                port=port,
                drain_s=drain_timeout,
                as_json=as_json,
                as_child=as_child,
                join=join,
            )
        )


def _serve_vllm(context: typer.Context, path: str, served_name: str, join: JoinOptions) -> None:
    """The same options for vLLM. Ends with its exit code.

    Raises ConfigurationError for those that vLLM has no place for.
    """
    from kvferry.cli import environment
    from kvferry.cli.serve.vllm import VllmOptions, serve_vllm

    for name in ("num_blocks", "max_batch_tokens", "heartbeat", "simulated_step"):
        if is_given(context, name):
            option = f"--{name.replace('_', '-')}"
            hint = "what follows -- goes to vllm serve as it is"
            raise ConfigurationError("this option is not for vLLM", found=option, expected="vLLM's own", hint=hint)
    given = context.params
    options = VllmOptions(
        model=path,
        served_name=served_name,
        engine_id=given["engine_id"],
        transport=given["transport"],
        digest=given["digest"],
        strategy=given["strategy"],
        staging_bytes=size(context, "staging_mib", "vllm") << 20,
        direction=given["transfer_direction"],
        layer_wise=given["layer_wise"],
        block_tokens=size(context, "block_tokens", "vllm"),
        dtype=given["dtype"],
        failure_policy=given["failure_policy"],
        host=given["host"],
        port=given["port"],
        transfer_port=given["transfer_port"],
        arguments=tuple(context.args),
        as_json=given["as_json"],
        as_child=given["as_child"],
        transfer_host=given["transfer_host"],
        token_file=given["token_file"] or environment.token_file(),
        lease_s=given["lease_timeout"] if is_given(context, "lease_timeout") else 0.0,
        # Whoever has started us as a child ends us sooner than that, and would leave vLLM behind.
        drain_s=given["drain_timeout"] if is_given(context, "drain_timeout") or not given["as_child"] else 0.0,
        join=join,
    )
    raise typer.Exit(serve_vllm(options))
