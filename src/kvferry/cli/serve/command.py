"""Options of `kvferry serve`, for the built-in engine, for vLLM and for SGLang."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli import environment
from kvferry.cli.console import errors_as_messages
from kvferry.cli.engine_choice import check_engine, check_passed, extras_of, left_to_engine, refuse_options
from kvferry.cli.options import (
    HERE,
    AccessOptions,
    Child,
    Drain,
    Engine,
    FailurePolicy,
    Host,
    Json,
    Model,
    TokenFile,
    TransferOptions,
    addresses,
    cache,
    command_of,
    common,
    is_given,
    moving,
    passed_options,
    times,
)
from kvferry.connectors.step_cost import step_cost_named
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side, is_base_url

if TYPE_CHECKING:
    from kvferry import AgentConfig


CORS = ("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials")
OURS = ("device", "num_blocks", "max_batch_tokens", "heartbeat", "simulated_step", *CORS)
"""Options of our own engine for what other engines have options of their own."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Which routers this engine tells that it is there, for which roles, and under which URL if not the one it has."""

    register: Annotated[list[str], common(help="URL of a router to join; repeatable.")] = field(default_factory=list)
    role: Annotated[list[Side], common(help="Role to join as; repeatable.")] = field(default_factory=list)
    advertise_url: Annotated[str, addresses(help="URL under which routers reach this engine, if not its own.")] = ""

    def __post_init__(self) -> None:
        if self.register and not self.role:
            raise ConfigurationError(
                "--register needs a role", found="--register without --role", expected="--role prefill or --role decode"
            )
        if not self.register and self.advertise_url:
            raise _alone("--advertise-url")
        for url in filter(None, (*self.register, self.advertise_url)):
            if not is_base_url(url.rstrip("/")):
                raise ConfigurationError("invalid URL", found=url, expected="such as http://10.0.0.5:8000")

    def check_role(self) -> None:
        """Raises ConfigurationError for a role that nobody would be told: most engines have none of their own."""
        if not self.register and self.role:
            raise _alone("--role")


def _alone(option: str) -> ConfigurationError:
    return ConfigurationError("this option needs --register", found=option, expected="--register URL as well")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, where, and how caches move. All time limits are in seconds.

    Another engine has its own default for a number that is 0; `arguments` go to its server as they are.
    """

    model: Model = "tiny"
    engine: Engine = "transformers"
    engine_id: Annotated[str, common(help="Unique name of this engine.")] = "engine-0"
    served_name: Annotated[str, cache(help="Model name in the API, if not the model's own.")] = ""
    dtype: Annotated[str, cache(help="Torch dtype, or auto for the model's own.")] = "auto"
    device: Annotated[str, cache(help="Device that computes: cpu, cuda or xpu, with or without a number.")] = "cpu"
    block_tokens: Annotated[int, cache(min=4, help="Tokens per cache block.")] = 16
    num_blocks: Annotated[int, cache(min=1, help="Number of cache blocks.")] = 1024
    max_batch_tokens: Annotated[int, cache(min=1, help="Tokens per step; longer prompts are chunked.")] = 512
    simulated_step: Annotated[
        str, cache(help="Make steps as slow as a larger model's: token=1.2ms,step=50ms (docs/bench.md).")
    ] = ""
    transfer: TransferOptions = field(default_factory=TransferOptions)
    staging_mib: Annotated[int, moving(min=1, help="MiB of staging memory (docs/staging.md).")] = 384
    layer_wise: Annotated[
        bool, moving("--layer-wise", help="Push each layer once it is computed (docs/staging.md).")
    ] = False
    failure_policy: Annotated[
        FailurePolicy, moving(help="If a cache does not arrive: recompute the prompt, or fail the request.")
    ] = FailurePolicy.RECOMPUTE
    host: Host = HERE
    port: Annotated[int, common(min=0, max=65535, help="HTTP port; 0 picks a free one.")] = 8100
    transfer_host: Annotated[str, common(help="Address for transfers; one that other hosts reach needs a token.")] = (
        HERE
    )
    transfer_port: Annotated[
        int, addresses(min=0, max=65535, help="Port for transfers (control channel); 0 picks a free one.")
    ] = 0
    token_file: TokenFile = ""
    lease_timeout: Annotated[float, times(min=0.1, help="How long a cache waits to be read.")] = 30.0
    heartbeat: Annotated[float, times(min=0.05, help="Interval of heartbeats; a peer that misses three is lost.")] = 1.0
    drain_timeout: Drain = 30.0
    start_timeout: Annotated[float, times(min=1, help="How long vLLM or SGLang may take to load its model.")] = 600.0
    join: JoinOptions = field(default_factory=JoinOptions)
    http_access: AccessOptions = field(default_factory=AccessOptions)
    as_json: Json = False
    as_child: Child = False
    arguments: tuple[str, ...] = ()


@command_of(ServeOptions)
def serve(context: typer.Context, options: ServeOptions) -> int:
    """Start one engine. Every engine can prefill for others and decode what others have prefilled.

    With --engine vllm or sglang, everything after -- is passed to that server. A server of SGLang has one --role.
    """
    with errors_as_messages(extras_of(options.engine)):
        options.transfer.check()
        check_engine(options.engine, context)
        options = replace(options, token_file=options.token_file or environment.token_file())
        options = replace(options, arguments=tuple(context.args))
        check_options(context, options)
        match options.engine:
            case "vllm":
                return _serve_vllm(context, options)
            case "sglang":
                return _serve_sglang(context, options)
            case _:
                return _serve_embedded(options)


def check_options(context: typer.Context, options: ServeOptions) -> None:
    """Raises ConfigurationError for what this engine cannot be told. Its package, token and model are not needed."""
    match options.engine:
        case "vllm":
            from kvferry.cli.serve import vllm

            options.join.check_role()
            refuse_options(options.engine, context, *OURS)
            check_passed(options.arguments, vllm.TAKEN)
        case "sglang":
            _check_sglang(context, options)
        case _:
            if is_given(context, "start_timeout"):
                what, expected = "this option is for servers of others", "--engine vllm or sglang"
                raise ConfigurationError(what, found="--start-timeout", expected=expected)
            options.join.check_role()
            step_cost_named(options.simulated_step)


def _serve_embedded(options: ServeOptions) -> int:
    from kvferry.cli.models import resolve
    from kvferry.connectors.jobs import Settings

    agent, access, step_cost = agent_of(options), options.http_access.checked(), step_cost_named(options.simulated_step)
    # Both load torch, which takes seconds: what is wrong with the options has been told by then.
    path, name = resolve(options.model)
    from kvferry.cli.serve import embedded

    sizes = options.block_tokens, options.num_blocks, options.max_batch_tokens
    settings = Settings(
        path,
        options.dtype,
        *sizes,
        step_cost=step_cost,
        layer_wise=options.layer_wise,
        device=options.device,
        buffer_device=options.transfer.buffer_device,
        staging_memory=options.transfer.staging_memory,
    )
    embedded.serve(replace(options, served_name=options.served_name or name), settings, agent, access)
    return 0


def agent_of(options: ServeOptions) -> AgentConfig:
    """The agent of the built-in engine. Raises ConfigurationError."""
    from kvferry import AgentConfig, read_token
    from kvferry.options import digest_policy_named, direction_named, may_switch_direction, staging_named
    from kvferry.session.timing import Timing

    transfer, staging_bytes = options.transfer, options.staging_mib << 20
    lease_s, heartbeat_s = options.lease_timeout, options.heartbeat
    if lease_s < 2 * heartbeat_s:
        found, expected = f"{lease_s:g} s", f"at least twice --heartbeat, which is {heartbeat_s:g} s"
        raise ConfigurationError("--lease-timeout is too short", found=found, expected=expected)
    return AgentConfig(
        options.engine_id,
        host=options.transfer_host,
        port=options.transfer_port,
        transport=transfer.transport,
        timing=Timing(lease_s=lease_s, heartbeat_s=heartbeat_s),
        token=read_token(options.token_file),
        digest=digest_policy_named(transfer.digest),
        direction=direction_named(transfer.transfer_direction),
        may_switch_direction=may_switch_direction(transfer.transfer_direction),
        staging_bytes=staging_bytes,
        staging=staging_named(transfer.strategy, staging_bytes),
    )


def _served_name(options: ServeOptions, name: str) -> str:
    """What an engine is going to call a model: what it is told itself comes first."""
    return passed_options(options.arguments).get("--served-model-name") or options.served_name or name


def _serve_vllm(context: typer.Context, options: ServeOptions) -> int:
    """Returns vLLM's exit code. Raises ConfigurationError."""
    from kvferry.cli.models import resolve
    from kvferry.cli.serve.vllm import serve_vllm

    path, name = resolve(options.model)
    unset = left_to_engine(context, "block_tokens", "staging_mib", "lease_timeout", *_hurry(options))
    return serve_vllm(replace(options, model=path, served_name=_served_name(options, name), **unset))


def _check_sglang(context: typer.Context, options: ServeOptions) -> None:
    from kvferry.cli.serve.sglang import check

    refuse_options(options.engine, context, *OURS)
    if is_given(context, "buffer_device"):
        what, expected = "this option does not apply to SGLang", "none: SGLang's own pool is what transports register"
        raise ConfigurationError(what, found="--buffer-device", expected=expected)
    if is_given(context, "failure_policy") and options.failure_policy is FailurePolicy.RECOMPUTE:
        what, expected = "a decode server of SGLang cannot compute a prompt itself", "--failure-policy fail"
        raise ConfigurationError(what, found="--failure-policy recompute", expected=expected)
    check(options)


def _serve_sglang(context: typer.Context, options: ServeOptions) -> int:
    """Returns SGLang's exit code. Raises ConfigurationError."""
    from kvferry.cli.models import resolve
    from kvferry.cli.serve.sglang import serve_sglang

    (role,) = options.join.role
    if not is_given(context, "engine_id"):
        # Two engines of one name would be taken for two starts of one.
        options = replace(options, engine_id=f"{role}-{secrets.token_hex(4)}")
    # What an agent would refuse is told before SGLang has loaded a model.
    agent_of(options)
    path, name = resolve(options.model)
    unset = left_to_engine(context, "staging_mib", "lease_timeout", *_hurry(options))
    return serve_sglang(replace(options, model=path, served_name=_served_name(options, name), **unset))


def _hurry(options: ServeOptions) -> tuple[str, ...]:
    """Whoever has started us as a child ends us sooner than the default, and would leave the engine behind."""
    return ("drain_timeout",) if options.as_child else ()
