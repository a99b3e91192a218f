"""Options of `kvferry serve`, for the built-in engine and for vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import errors_as_messages
from kvferry.cli.engine_choice import check_engine, check_vllm, extras_of, size
from kvferry.cli.options import (
    HERE,
    AllowCredentials,
    AllowedHeaders,
    AllowedMethods,
    AllowedOrigins,
    ApiKey,
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
    common,
    is_given,
    moving,
    times,
)
from kvferry.cli.serve.joining import JoinOptions
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side


def serve(
    context: typer.Context,
    model: Model = "tiny",
    engine: Engine = "transformers",
    engine_id: Annotated[str, common(help="Unique name of this engine.")] = "engine-0",
    served_name: Annotated[str, cache(help="Model name in the API, if not the model's own.")] = "",
    dtype: Annotated[str, cache(help="Torch dtype, or auto for the model's own.")] = "auto",
    block_tokens: Annotated[int, cache(min=4, help="Tokens per cache block.")] = 16,
    num_blocks: Annotated[int, cache(min=1, help="Number of cache blocks.")] = 1024,
    max_batch_tokens: Annotated[int, cache(min=1, help="Tokens per step; longer prompts are chunked.")] = 512,
    simulated_step: Annotated[
        str, cache(help="Make steps as slow as a larger model's: token=1.2ms,step=50ms (docs/bench.md).")
    ] = "",
    transport: Transport = "auto",
    strategy: Strategy = "auto",
    staging_mib: Annotated[int, moving(min=1, help="MiB of staging memory (docs/staging.md).")] = 384,
    transfer_direction: TransferDirection = "auto",
    layer_wise: Annotated[
        bool, moving("--layer-wise", help="Push each layer once it is computed (docs/staging.md).")
    ] = False,
    digest: Digest = "sampled",
    failure_policy: Annotated[
        FailurePolicy, moving(help="If a cache does not arrive: recompute the prompt, or fail the request.")
    ] = FailurePolicy.RECOMPUTE,
    host: Host = HERE,
    port: Annotated[int, common(min=0, max=65535, help="HTTP port; 0 picks a free one.")] = 8100,
    transfer_host: Annotated[
        str, common(help="Address for transfers; one that other hosts reach needs a token.")
    ] = HERE,
    transfer_port: Annotated[
        int, addresses(min=0, max=65535, help="Port for transfers (control channel); 0 picks a free one.")
    ] = 0,
    token_file: TokenFile = "",
    lease_timeout: Annotated[float, times(min=0.1, help="How long a cache waits to be read.")] = 30.0,
    heartbeat: Annotated[
        float, times(min=0.05, help="Interval of heartbeats; a peer that misses three is lost.")
    ] = 1.0,
    drain_timeout: Drain = 30.0,
    register: Annotated[list[str], common(help="URL of a router to join; repeatable.")] = [],  # noqa: B006
    role: Annotated[list[Side], common(help="Role to join as; repeatable.")] = [],  # noqa: B006
    advertise_url: Annotated[str, addresses(help="URL under which routers reach this engine, if not its own.")] = "",
    api_key: ApiKey = [],  # noqa: B006
    allowed_origins: AllowedOrigins = [],  # noqa: B006
    allowed_methods: AllowedMethods = ["*"],  # noqa: B006
    allowed_headers: AllowedHeaders = ["*"],  # noqa: B006
    allow_credentials: AllowCredentials = False,
    as_json: Json = False,
    as_child: Child = False,
) -> None:
    """Start one engine. Every engine can prefill for others and decode what others have prefilled.

    With --engine vllm, everything after -- is passed to `vllm serve`.
    """
    with errors_as_messages(extras_of(engine)):
        from kvferry.cli.models import resolve
        from kvferry.options import digest_policy_named, direction_named, may_turn, staging_named
        from kvferry.transport.registry import check_name

        check_name(transport)
        policy, direction = digest_policy_named(digest), direction_named(transfer_direction)
        check_engine(engine, context)
        join = JoinOptions(tuple(register), tuple(role), advertise_url)
        if engine == "vllm":
            check_vllm()
            path, name = resolve(model)
            _serve_vllm(context, path, served_name or name, join)
        from kvferry import AgentConfig, read_token
        from kvferry.cli import environment
        from kvferry.cli.server.access import access_of
        from kvferry.connectors.jobs import Settings
        from kvferry.connectors.step_cost import step_cost_named
        from kvferry.session.timeouts import Timing

        if lease_timeout < 2 * heartbeat:
            found, expected = f"{lease_timeout:g} s", f"at least twice --heartbeat, which is {heartbeat:g} s"
            raise ConfigurationError("--lease-timeout is too short", found=found, expected=expected)
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
                access=access_of(context.params),
            )
        )


def _serve_vllm(context: typer.Context, path: str, served_name: str, join: JoinOptions) -> None:
    """The same options for vLLM. Ends with its exit code.

    Raises ConfigurationError for those that vLLM has no place for.
    """
    from kvferry.cli import environment
    from kvferry.cli.serve.vllm import VllmOptions, serve_vllm

    cors = ("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials")
    for name in ("num_blocks", "max_batch_tokens", "heartbeat", "simulated_step", *cors):
        if is_given(context, name):
            option = f"--{name.replace('_', '-')}"
            hint = "pass options of vllm serve after --"
            raise ConfigurationError(
                "this option does not apply to vLLM", found=option, expected="the option of vLLM itself", hint=hint
            )
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
        api_keys=tuple(given["api_key"]) or environment.api_keys(),
    )
    raise typer.Exit(serve_vllm(options))
