"""`kvferry serve --engine sglang`: starts SGLang's own server with our transfer backend and its settings."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import msgspec

from kvferry.cli import environment
from kvferry.cli.engine_choice import check_passed
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.engine_process import NO_TLS, EngineProcess, key_in, serve_engine
from kvferry.cli.server import listening
from kvferry.connectors.sglang.plugin import NAME
from kvferry.connectors.sglang.settings import VARIABLE, Settings
from kvferry.errors import ConfigurationError
from kvferry.http.registration import Side

LAUNCHER = "kvferry.cli.serve.sglang_launcher"
HINT = "see its output above"
TAKEN: Final = {
    "--disaggregation-mode": "kvferry's own --role",
    "--disaggregation-transfer-backend": "none: it is kvferry",
    "--disaggregation-bootstrap-port": "kvferry's own --transfer-port",
    "--disaggregation-ib-device": "UCX_NET_DEVICES, which restricts the network cards that NIXL chooses from",
    "--host": "kvferry's own --host",
    "--port": "kvferry's own --port",
    "--ssl-keyfile": NO_TLS,
    "--ssl-certfile": NO_TLS,
}
"""Options of SGLang that are not passed on, and what to use instead."""


def check(options: ServeOptions) -> Side:
    """The role to serve in. Raises ConfigurationError for what SGLang does not do, or not that way."""
    if len(options.join.role) != 1:
        found = " ".join(f"--role {role}" for role in options.join.role) or "no --role"
        what = "an SGLang server has one role"
        raise ConfigurationError(what, found=found, expected="--role prefill or --role decode")
    if options.layer_wise:
        what, hint = "SGLang's caches do not move layer by layer", "leave --layer-wise out"
        raise ConfigurationError(what, found="--layer-wise", hint=hint)
    (role,) = options.join.role
    if role is Side.DECODE and options.transfer_port:
        what, expected = "nobody asks a decode server of SGLang for a cache", "--transfer-port with --role prefill only"
        raise ConfigurationError(what, found=f"--transfer-port {options.transfer_port}", expected=expected)
    if VARIABLE in os.environ:
        what, expected = f"{VARIABLE} is for servers that are started without kvferry", "options of kvferry serve"
        raise ConfigurationError(what, found=os.environ[VARIABLE], expected=expected, hint=f"unset {VARIABLE}")
    check_passed(options.arguments, TAKEN)
    return role


def serve_sglang(options: ServeOptions) -> int:
    """Run SGLang until it ends or we are told to end; returns its exit code, 0 when we were told.

    Raises ConfigurationError for what it cannot be asked for, when a port is taken, when it ends early or is not ready
    in time.
    """
    role = check(options)
    with ExitStack() as held:
        # Routers need to know both ports, so we choose those that are left to us.
        http = held.enter_context(listening.reserve(options.host, options.port))
        host, port = http.getsockname()[:2]
        options, facts = replace(options, host=host, port=port), dict[str, str]()
        if role is Side.PREFILL:
            transfers = held.enter_context(listening.reserve(settings_of(options).host, options.transfer_port))
            options = replace(options, transfer_port=transfers.getsockname()[1])
            facts = {"transfer_address": listening.url_of(transfers).replace("http:", "tcp:")}
        command, variables = sglang_command(options, role), sglang_environment(options)
        url = listening.url_of(http)
        return serve_engine(options, EngineProcess("SGLang", command, variables, url, "/health", HINT, facts))


def sglang_command(options: ServeOptions, role: Side) -> list[str]:
    """The command line that starts SGLang with our backend. Neither the token nor a key is on it."""
    command = [sys.executable, "-m", LAUNCHER, "--model-path", options.model]
    command += ["--served-model-name", options.served_name, "--host", options.host, "--port", str(options.port)]
    command += ["--dtype", options.dtype, "--page-size", str(options.block_tokens)]
    command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", NAME]
    if role is Side.PREFILL:
        command += ["--disaggregation-bootstrap-port", str(options.transfer_port)]
    return [*command, *options.arguments]


def settings_of(options: ServeOptions) -> Settings:
    """What our backend is told. An option that is 0 or empty is left to its own default."""
    transfer = options.transfer
    chosen = {
        "transport": transfer.transport,
        "strategy": transfer.strategy,
        "transfer_direction": transfer.transfer_direction,
        "digest": transfer.digest,
        "engine_id": options.engine_id,
        "host": options.transfer_host,
        "token_file": options.token_file,
        "staging_bytes": options.staging_mib << 20,
        "staging_memory": transfer.staging_memory,
        "lease_s": options.lease_timeout,
    }
    return msgspec.structs.replace(Settings(), **{name: value for name, value in chosen.items() if value})


def sglang_environment(options: ServeOptions) -> dict[str, str]:
    """Our settings, and a key. Raises ConfigurationError for several keys."""
    settings = msgspec.json.encode(settings_of(options)).decode()
    return {**os.environ, VARIABLE: settings, **key_in(environment.API_KEY, options, "SGLang")}
