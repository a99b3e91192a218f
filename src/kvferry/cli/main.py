"""The `kvferry` command. Each function only names its options; the work is in the module of the same name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry import __version__
from kvferry.cli import bench, console
from kvferry.cli.joining import JoinOptions
from kvferry.cli.logs import LogFormat
from kvferry.errors import ConfigurationError
from kvferry.registration import Side

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Move a request's KV cache from the engine that computed it to the engine that needs it.",
)
app.add_typer(bench.app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Child = Annotated[bool, typer.Option("--as-child", hidden=True, help="End when standard input closes.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Model = Annotated[str, typer.Option(help="Folder or Hugging Face name; `tiny` is made on this machine.")]
Engine = Annotated[str, typer.Option(help="transformers (built in) or vllm; options of vLLM go behind --.")]
Drain = Annotated[float, typer.Option(min=0.0, help="Seconds that open requests and leases have after SIGTERM.")]
HERE = "127.0.0.1"
_friendly = console.friendly
Digest = Annotated[str, typer.Option(help="Compare what has arrived: sampled, full (every byte) or off.")]
Transport = Annotated[str, typer.Option(help="auto, shm, cma, tcp or nixl.")]
Strategy = Annotated[str, typer.Option(help="How a cache moves: auto, direct, scatter or pack (docs/staging.md).")]
TransferDirection = Annotated[
    str, typer.Option(help="Who moves a cache: pull (its reader), push (its owner), or auto: what is fastest.")
]


def _check_engine(engine: str, context: typer.Context) -> None:
    """Raises ConfigurationError for an engine that we do not have, and for arguments that none would get."""
    if engine not in ("transformers", "vllm"):
        raise ConfigurationError("no such engine", found=engine, expected="--engine transformers or --engine vllm")
    if engine != "vllm" and context.args:
        found = " ".join(context.args)
        raise ConfigurationError("these arguments belong to no engine", found=found, expected="--engine vllm -- …")


def _size(context: typer.Context, name: str, engine: str) -> int:
    """A number of the command line; 0, which leaves it to vLLM, where that is the engine and none was given."""
    return int(context.params[name]) if engine != "vllm" or _is_given(context, name) else 0


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has an option, or its default counts."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command(context_settings={"allow_extra_args": True})
def up(
    context: typer.Context,
    model: Model = "tiny",
    prefill: Annotated[int, typer.Option(min=1, help="Number of prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode engines.")] = 1,
    transport: Transport = "auto",
    digest: Digest = "sampled",
    transfer_direction: TransferDirection = "auto",
    strategy: Strategy = "auto",
    once: Annotated[
        str | None, typer.Option(help="Answer this prompt and stop; exit code 0 if the answers are equal.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 32,
    prefill_block_tokens: Annotated[int, typer.Option(min=4, help="Block size of the prefill engines.")] = 16,
    decode_block_tokens: Annotated[int, typer.Option(min=4, help="Block size of the decode engines.")] = 16,
    cache_tokens: Annotated[int, typer.Option(min=64, help="Tokens that each engine's cache holds.")] = 16384,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router.")] = 8000,
    log_dir: Annotated[str, typer.Option(help="Folder for the engines' output; a temporary one if empty.")] = "",
    engine: Engine = "transformers",
    as_json: Json = False,
) -> None:
    """Start prefill, decode and router on this machine, answer a prompt, prove it right, and keep serving.

    With --engine vllm, what follows -- goes to `vllm serve` as it is; the sizes are vLLM's unless given here.
    """
    with _friendly():
        from kvferry.cli.up import UpOptions
        from kvferry.cli.up import up as run
        from kvferry.plan.copies import direction_named
        from kvferry.plan.digest import policy_named
        from kvferry.session.ways import allowed_by
        from kvferry.transport.opening import check_name

        check_name(transport)
        policy_named(digest)
        direction_named(transfer_direction)
        allowed_by(strategy)
        _check_engine(engine, context)
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
            prefill_block_tokens=_size(context, "prefill_block_tokens", engine),
            decode_block_tokens=_size(context, "decode_block_tokens", engine),
            cache_tokens=cache_tokens,
            port=port,
            log_directory=log_dir,
            as_json=as_json,
        )
        code = run(options)
    raise typer.Exit(code)


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    model: Model = "tiny",
    engine_id: Annotated[str, typer.Option(help="Name of this engine in references and metrics.")] = "engine-0",
    served_name: Annotated[str, typer.Option(help="Model name in the API; the model's own if empty.")] = "",
    transport: Transport = "auto",
    digest: Digest = "sampled",
    transfer_direction: TransferDirection = "auto",
    strategy: Strategy = "auto",
    staging_mib: Annotated[int, typer.Option(min=1, help="MiB of staging memory (docs/staging.md).")] = 384,
    block_tokens: Annotated[int, typer.Option(min=4, help="Tokens per block.")] = 16,
    num_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the cache.")] = 1024,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step; longer prompts go in chunks.")] = 512,
    dtype: Annotated[str, typer.Option(help="Torch dtype, or auto for the model's own.")] = "auto",
    failure_policy: Annotated[str, typer.Option(help="When a cache does not arrive: recompute or fail.")] = "recompute",
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 for any free one.")] = 8100,
    transfer_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the control channel.")] = 0,
    transfer_host: Annotated[str, typer.Option(help="Where peers reach it; beyond this host with a token.")] = HERE,
    token_file: Annotated[str, typer.Option(help="The token that all engines share; else KVFERRY_TOKEN_FILE.")] = "",
    lease_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a cache waits for its reader.")] = 30.0,
    heartbeat: Annotated[float, typer.Option(min=0.05, help="Seconds; a peer silent for three is lost.")] = 1.0,
    drain_timeout: Drain = 30.0,
    layer_wise: Annotated[
        bool, typer.Option("--layer-wise", help="Push early legs layer by layer (docs/staging.md).")
    ] = False,
    simulated_step: Annotated[
        str, typer.Option(help="Let steps last as another model's: token=1.2ms,step=50ms (docs/bench.md).")
    ] = "",
    engine: Engine = "transformers",
    register: Annotated[list[str], typer.Option(help="URL of a router to join; repeat for more.")] = [],  # noqa: B006
    role: Annotated[list[Side], typer.Option(help="What it joins as: prefill or decode; or both.")] = [],  # noqa: B006
    advertise_url: Annotated[str, typer.Option(help="URL under which routers reach it, if not --host.")] = "",
    as_json: Json = False,
    as_child: Child = False,
) -> None:
    """Serve one model; it can prefill for others and decode what others prefilled.

    With --engine vllm, what follows -- goes to `vllm serve` as it is.
    """
    with _friendly():
        from kvferry.cli.models import resolve
        from kvferry.plan.copies import direction_named, may_turn
        from kvferry.plan.digest import policy_named
        from kvferry.transport.opening import check_name

        check_name(transport)
        policy, direction = policy_named(digest), direction_named(transfer_direction)
        _check_engine(engine, context)
        join = JoinOptions(tuple(register), tuple(role), advertise_url)
        path, name = resolve(model)
        if engine == "vllm":
            _serve_vllm(context, path, served_name or name, join)
        from kvferry.agent import AgentConfig, read_token, staging_named
        from kvferry.cli import environment
        from kvferry.cli import serve as command
        from kvferry.connectors.jobs import Settings
        from kvferry.connectors.step_cost import step_cost_named
        from kvferry.session.events import Timing

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
        command.serve(
            command.ServeOptions(
                settings=Settings(
                    *(path, dtype, block_tokens, num_blocks, max_batch_tokens),
                    step_cost=step_cost_named(simulated_step),
                    layer_wise=layer_wise,
                ),
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
    from kvferry.cli.serve_vllm import VllmOptions, serve_vllm

    for name in ("num_blocks", "max_batch_tokens", "heartbeat", "simulated_step", "layer_wise"):
        if _is_given(context, name):
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
        staging_bytes=_size(context, "staging_mib", "vllm") << 20,
        direction=given["transfer_direction"],
        block_tokens=_size(context, "block_tokens", "vllm"),
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
        lease_s=given["lease_timeout"] if _is_given(context, "lease_timeout") else 0.0,
        # Whoever has started us as a child ends us sooner than that, and would leave vLLM behind.
        drain_s=given["drain_timeout"] if _is_given(context, "drain_timeout") or not given["as_child"] else 0.0,
        join=join,
    )
    raise typer.Exit(serve_vllm(options))


@app.command()
def route(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill engine; repeat for more.")] = [],  # noqa: B006
    decode: Annotated[list[str], typer.Option(help="URL of a decode engine; repeat for more.")] = [],  # noqa: B006
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    prefill_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole prefill.")] = 300.0,
    decode_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until an answer begins.")] = 1800.0,
    stall_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of silence inside an answer.")] = 120.0,
    members_file: Annotated[str, typer.Option(help="JSON file with more engines; it may change.")] = "",
    accept_registrations: Annotated[bool, typer.Option("--accept-registrations", help="Engines may register.")] = False,
    token_file: Annotated[str, typer.Option(help="The token that they must share; else KVFERRY_TOKEN_FILE.")] = "",
    policy: Annotated[str, typer.Option(help="balanced, an entry point's name, or module:function.")] = "balanced",
    ttft_slo: Annotated[float, typer.Option(min=0, help="Turn away what would start later; seconds, 0: never.")] = 0.0,
    max_requests: Annotated[int, typer.Option(min=0, help="Per decode engine at a time; 0: any number.")] = 0,
    skip_prefill_below: Annotated[
        str, typer.Option(help="Tokens that decode computes itself: a number, or auto.")
    ] = "0",
    early_decode_from: Annotated[
        int, typer.Option(min=0, help="Decode legs of prompts with so many tokens begin with prefill; 0: none.")
    ] = 0,
    require_prefill: Annotated[bool, typer.Option("--require-prefill", help="Not ready without a pair.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Lines for people, or JSON for machines.")] = LogFormat.PLAIN,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line per request.")] = False,
    otel: Annotated[bool, typer.Option("--otel", help="Send OpenTelemetry spans; see the OTEL_* variables.")] = False,
    drain_timeout: Drain = 30.0,
    as_json: Json = False,
    as_child: Child = False,
) -> None:
    """Route OpenAI requests over prefill and decode engines."""
    with _friendly():
        from kvferry.cli import route as command
        from kvferry.router.config import RouterConfig
        from kvferry.router.judgement import Judgement
        from kvferry.router.plugins import policy_named

        limits = command.limits_of(ttft_slo, max_requests, skip_prefill_below)
        router = RouterConfig(
            prefill_urls=tuple(prefill),
            decode_urls=tuple(decode),
            prefill_timeout_s=prefill_timeout,
            decode_timeout_s=decode_timeout,
            stall_timeout_s=stall_timeout,
            members_file=members_file,
            registration=command.registration_of(accept_registrations, token_file),
            judgement=Judgement(policy_named(policy), limits),
            require_prefill=require_prefill,
            early_from_tokens=early_decode_from,
        )
        logs = command.LogOptions(log_format, access_log, otel)
        command.route(command.RouteOptions(router, host, port, drain_timeout, as_json, as_child, logs))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="URL of the router.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    as_json: Json = False,
) -> None:
    """Show live what a router and its engines are doing."""
    with _friendly():
        from kvferry.cli import top as command

        command.top(command.TopOptions(url, interval, 1 if once else 0, as_json))


@app.command()
def plan(
    prefill: Annotated[str, typer.Option(help="Such as tp=4,pp=1,block=16; also cp, dcp, run, kernel, format, pool.")],
    decode: Annotated[str, typer.Option(help="Such as tp=2,block=64.")],
    tokens: Annotated[int, typer.Option(min=0, max=1 << 32, help="Length of the prompt.")] = 8192,
    cached: Annotated[int, typer.Option(min=0, help="How many of them the decode side has already.")] = 0,
    model: Annotated[str, typer.Option(help="A name, a config.json or its folder; else give the numbers below.")] = "",
    cache_dtype: Annotated[str, typer.Option(help="dtype of the cache, with --model: auto is the model's.")] = "auto",
    draft: Annotated[bool, typer.Option("--draft", help="With the model's own draft layers.")] = False,
    link: Annotated[str, typer.Option(help="Speed of each rank's link, such as 50GB/s or 400Gbit/s.")] = "50GB/s",
    layout: Annotated[str, typer.Option(help="Cache format of engines that name none.")] = "token-major",
    prefill_speed: Annotated[float, typer.Option(min=0, help="Tokens/s that the prefill engine computes.")] = 0.0,
    html: Annotated[str, typer.Option(help="Draw the plan as a page in this file.")] = "",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers, without --model.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="Number of KV heads, without --model.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of one head, without --model.")] = 128,
    dtype: Annotated[str, typer.Option(help="dtype of the cache, without --model.")] = "bfloat16",
    scattered: Annotated[bool, typer.Option(help="Block ids at random, as in a busy pool, not adjacent.")] = False,
    as_json: Json = False,
) -> None:
    """Print what moves where between two topologies, without any hardware."""
    with _friendly():
        from kvferry.cli import plan as command

        if model:
            entry = command.model_of(model, cache_dtype, draft)
        else:
            entry = command.model_of_numbers(layers, heads, head_dim, dtype)
        prompt = command.Prompt(tokens, cached, scattered)
        options = command.PlanOptions(entry, prefill, decode, layout, prompt, link, prefill_speed)
        command.plan(options, command.Output(as_json, html))


@app.command()
def doctor(
    peer: Annotated[str, typer.Option(help="host:port of a running engine's transfers, to test the way to it.")] = "",
    token_file: Annotated[str, typer.Option(help="The token that all engines share; else KVFERRY_TOKEN_FILE.")] = "",
    device: Annotated[str, typer.Option(help="Where the engine computes: cpu, cuda, rocm, xpu, tpu; else found.")] = "",
    buffer_device: Annotated[str, typer.Option(help="Whose memory is registered: cpu, or the device.")] = "",
    as_json: Json = False,
) -> None:
    """Say what this machine can do for transfers, what is chosen and why, and what is wrong.

    Exit code 0 when nothing is, 1 with warnings, 2 with errors.
    """
    with _friendly():
        from kvferry.cli import doctor as command
        from kvferry.cli import environment

        token = token_file or environment.token_file()
        code = command.doctor(command.DoctorOptions(device, buffer_device, peer, token, as_json))
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Move a request's KV cache from the engine that computed it to the engine that needs it."""
    if show:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
