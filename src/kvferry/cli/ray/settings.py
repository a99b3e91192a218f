"""What a fleet on Ray is told: one record, from the arguments of a Serve application or the options of `kvferry up`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from typer import Context

from kvferry.cli.engine_choice import OTHER_ENGINES, check_passed
from kvferry.cli.options import context_of, is_given, option_of, passed_options, record_of, without_keys
from kvferry.cli.route.command import RouteOptions, route
from kvferry.cli.route.server import config_of
from kvferry.cli.serve.command import ServeOptions, agent_of, check_options, serve
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side

# What one engine should have to do: tokens in flight, open requests. Guesses, as in the Helm chart.
TARGETS: Final = {Side.PREFILL: 8192.0, Side.DECODE: 32.0}
# Options that have one value on Ray, or a field of their own, or a key that Ray's dashboard would show.
NOT_OF_SERVE: Final = (
    *("model", "engine", "engine_id", "host", "port", "transfer_host", "transfer_port", "token_file", "drain_timeout"),
    *("start_timeout", "register", "role", "advertise_url", "api_key", "as_json", "as_child"),
)
NOT_OF_ROUTE: Final = (
    *("accept_registrations", "token_file", "host", "port", "drain_timeout", "api_key", "engine_api_key"),
    *("log_format", "access_log", "otel", "as_json", "as_child"),
)
# Options of an engine's server that have a field, that Ray's dashboard would show, or that end it at once.
NOT_OF_SERVER: Final = {
    "--api-key": "KVFERRY_API_KEY in the environment of the nodes",
    "--admin-api-key": "none: Ray's dashboard would show it",
    "--shutdown-timeout": "the setting drain_timeout_s",
    "--help": "options that the server goes on with",
    "--version": "options that the server goes on with",
}
MAX_DRAIN_S: Final = 86_400.0
MIN_START_S: Final = 1.0
NUMBERS: Final = ("target_load", "upscale_delay_s", "downscale_delay_s", "look_back_s")


class RoleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engines of one role. Ray reserves `resources` for each of them, on one node.

    Ray keeps as many as make the load of each about `target_load`: tokens in flight of prefill engines, open requests
    of decode engines, both as the router counts them; 0: `TARGETS`. `extra_args` are options of `kvferry serve`,
    `engine_args` of the engine's own server.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    resources: dict[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    target_load: float = 0.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0
    extra_args: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()


class RaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole fleet. `extra_args` and `engine_args` are for all engines, and stand before those of a role.

    `token_file` is a path on every node; empty: the one of KVFERRY_TOKEN_FILE where the application is built. With
    `nodes_may_join`, resources that no node has now are waited for. `router_args` are options of `kvferry route`.
    """

    model: str = "tiny"
    engine: str = "transformers"
    token_file: str = ""
    drain_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    nodes_may_join: bool = False
    extra_args: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    router_resources: dict[str, float] = msgspec.field(default_factory=lambda: {"CPU": 1.0})
    prefill: RoleSettings = msgspec.field(default_factory=RoleSettings)
    decode: RoleSettings = msgspec.field(default_factory=RoleSettings)

    @property
    def roles(self) -> dict[Side, RoleSettings]:
        return {Side.PREFILL: self.prefill, Side.DECODE: self.decode}

    def serve_words(self, side: Side) -> tuple[str, ...]:
        """The options of `kvferry serve` for a role, as far as they are the same for all of its engines."""
        role = self.roles[side]
        engine_args = (*self.engine_args, *role.engine_args)
        own = ("--model", self.model, "--engine", self.engine, "--drain-timeout", f"{self.drain_timeout_s:g}")
        of_role = ("--role", str(side)) if self.engine == "sglang" else ()
        return (*own, *of_role, *self.extra_args, *role.extra_args, *(("--", *engine_args) if engine_args else ()))


def settings_from(arguments: Mapping[str, Any]) -> RaySettings:
    """The record, checked as far as it can be without a cluster. Raises ConfigurationError.

    `serve run` gives texts for numbers.
    """
    try:
        settings = msgspec.convert(dict(arguments), RaySettings, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(RaySettings.__struct_fields__)
        raise ConfigurationError("invalid settings of a fleet on Ray", found=str(error), expected=known) from error
    if settings.engine not in (expected := ("transformers", *OTHER_ENGINES)):
        raise ConfigurationError("unknown engine", found=settings.engine, expected=" or ".join(expected))
    if not settings.model:
        raise ConfigurationError("no model", found="model is empty", expected="a Hugging Face name, or a folder")
    _check_range("drain_timeout_s", settings.drain_timeout_s, 0, MAX_DRAIN_S)
    _check_range("start_timeout_s", settings.start_timeout_s, MIN_START_S)
    _check_resources("the router", settings.router_resources, may_be_none=True)
    for side, role in settings.roles.items():
        _check_role(side, role)
        _check_engine(settings, side)
    routing = record_of(RouteOptions, _checked("router_args", settings.router_args, route, NOT_OF_ROUTE))
    # With an engine that it is told, a router needs no token for others.
    config_of(replace(routing, decode=routing.decode or ["http://127.0.0.1:1"]))
    routing.http_access.checked()
    return settings


def _check_role(side: Side, role: RoleSettings) -> None:
    if not 1 <= role.min_replicas <= role.max_replicas:
        found = f"min_replicas {role.min_replicas}, max_replicas {role.max_replicas}"
        expected = "1 <= min_replicas <= max_replicas"
        raise ConfigurationError(f"there cannot be so many {side} engines", found=found, expected=expected)
    for name in NUMBERS:
        _check_range(f"{side}.{name}", getattr(role, name), 0)
    _check_resources(f"a {side} engine", role.resources)


def _check_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    if not least <= value <= most or math.isinf(value):
        expected = f"{least:g} or more" if math.isinf(most) else f"{least:g} to {most:g}"
        raise ConfigurationError("a setting is out of range", found=f"{name}: {value:g}", expected=expected)


def _check_engine(settings: RaySettings, side: Side) -> None:
    """Raises ConfigurationError for what an engine of this role would refuse, as far as that shows without it."""
    role = settings.roles[side]
    _checked("extra_args", (*settings.extra_args, *role.extra_args), serve, NOT_OF_SERVE)
    engine_args = (*settings.engine_args, *role.engine_args)
    if engine_args and settings.engine not in OTHER_ENGINES:
        # By name only, for a value may be a key.
        what, found = "engine_args are for another engine's server", next(iter(passed_options(engine_args)), "values")
        raise ConfigurationError(what, found=found, expected="extra_args, or another engine")
    if ended := {"--", "-h", "-v"} & {*engine_args}:
        what, expected = "this cannot stand in engine_args", "options that the server goes on with"
        raise ConfigurationError(what, found=" ".join(sorted(ended)), expected=expected)
    check_passed(engine_args, NOT_OF_SERVER)
    context = context_of(settings.serve_words(side), serve)
    options = replace(record_of(ServeOptions, context), arguments=tuple(context.args))
    options.transfer.check()
    check_options(context, options)
    # The token is on the nodes, and vLLM's server has an agent that takes what this one would refuse.
    if settings.engine != "vllm":
        agent_of(replace(options, token_file=""))


def _check_resources(who: str, resources: Mapping[str, float], may_be_none: bool = False) -> None:
    if not resources and not may_be_none:
        raise ConfigurationError(f"{who} has no resources", found="{}", expected="such as CPU: 4, GPU: 1")
    for name, amount in resources.items():
        if not name.strip():
            found, expected = f"{name!r}: {amount:g}", "a name, such as GPU"
            raise ConfigurationError(f"{who} has a resource without a name", found=found, expected=expected)
        # Fractions share a processor or a device; Ray gives no more than one in parts.
        if not 0 < amount < float("inf") or (amount > 1 and amount != int(amount)):
            found, expected = f"{name}: {amount:g}", "a whole number, or a fraction between 0 and 1"
            raise ConfigurationError(f"{who} has a resource that Ray cannot give", found=found, expected=expected)


def _checked(field: str, words: tuple[str, ...], command: Any, refused: tuple[str, ...]) -> Context:
    context = context_of(words, command)
    given = next((name for name in refused if is_given(context, name)), "")
    # With nothing behind it, `--` leaves no other trace.
    if given or context.args or "--" in words:
        found = option_of(given) if given else without_keys(context.args) or "--"
        expected = "options that are not set by Ray, by another field, or in the environment of the nodes"
        hint = "what is for the engine's own server stands in engine_args" if not given and command is serve else ""
        raise ConfigurationError(f"this cannot stand in {field}", found=found, expected=expected, hint=hint)
    return context
