"""What a fleet on Ray is told: one record, from the arguments of a Serve application or the options of `kvferry up`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from typer import Context

from kvferry.cli.engine_choice import OTHER_ENGINES
from kvferry.cli.options import context_of, is_given, option_of, record_of
from kvferry.cli.route.command import RouteOptions, route
from kvferry.cli.route.server import config_of
from kvferry.cli.serve.command import ServeOptions, serve
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
    _check_resources("the router", settings.router_resources, may_be_none=True)
    for side, role in settings.roles.items():
        _check_role(side, role)
        words = _checked("extra_args", (*settings.extra_args, *role.extra_args), serve, NOT_OF_SERVE)
        record_of(ServeOptions, words).transfer.check()
    routing = record_of(RouteOptions, _checked("router_args", settings.router_args, route, NOT_OF_ROUTE))
    # With an engine that it is told, a router needs no token for others.
    config_of(replace(routing, decode=routing.decode or ["http://127.0.0.1:1"]))
    return settings


def _check_role(side: Side, role: RoleSettings) -> None:
    if not 1 <= role.min_replicas <= role.max_replicas:
        found = f"min_replicas {role.min_replicas}, max_replicas {role.max_replicas}"
        expected = "1 <= min_replicas <= max_replicas"
        raise ConfigurationError(f"there cannot be so many {side} engines", found=found, expected=expected)
    for name in NUMBERS:
        if not 0 <= getattr(role, name) < float("inf"):
            found = f"{side}.{name}: {getattr(role, name):g}"
            raise ConfigurationError("a setting is out of range", found=found, expected="0 or more")
    _check_resources(f"a {side} engine", role.resources)


def _check_resources(who: str, resources: Mapping[str, float], may_be_none: bool = False) -> None:
    if not resources and not may_be_none:
        raise ConfigurationError(f"{who} has no resources", found="{}", expected="such as CPU: 4, GPU: 1")
    for name, amount in resources.items():
        # Fractions share a processor or a device; Ray gives no more than one in parts.
        if not 0 < amount < float("inf") or (amount > 1 and amount != int(amount)):
            found, expected = f"{name}: {amount:g}", "a whole number, or a fraction between 0 and 1"
            raise ConfigurationError(f"{who} has a resource that Ray cannot give", found=found, expected=expected)


def _checked(field: str, words: tuple[str, ...], command: Any, refused: tuple[str, ...]) -> Context:
    context = context_of(words, command)
    given = next((name for name in refused if is_given(context, name)), "")
    if given or context.args:
        found = option_of(given) if given else " ".join(context.args)
        expected = "options that are not set by Ray, by another field, or in the environment of the nodes"
        hint = "what is for the engine's own server stands in engine_args" if context.args else ""
        raise ConfigurationError(f"this cannot stand in {field}", found=found, expected=expected, hint=hint)
    return context
