"""`kvferry serve --engine vllm`: starts `vllm serve` with our connector, for people who do not want to write JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from math import ceil
from typing import Final

from kvferry.cli.options import HERE
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.engine_process import NO_TLS, EngineProcess, key_in, serve_engine
from kvferry.cli.server import listening

# What our router asks of an engine, on vLLM's own server.
MIDDLEWARE = "kvferry.connectors.vllm_middleware.FerryMiddleware"
# What the connector does if it is not told.
DEFAULTS = {
    "digest": "sampled",
    "strategy": "auto",
    "transfer_direction": "auto",
    "host": HERE,
    "staging_memory": "host",
}
EXTENSION = "kvferry.connectors.vllm.extension.Extension"
BY_HAND = "none: start vllm serve yourself, with kvferry's connector as docs/vllm.md has it"
TAKEN: Final = {
    "--host": "kvferry's own --host",
    "--port": "kvferry's own --port",
    "--uds": "kvferry's own --host and --port",
    "--ssl-keyfile": NO_TLS,
    "--ssl-certfile": NO_TLS,
    "--grpc": "none: the router and kvferry speak HTTP with an engine",
    "--headless": BY_HAND,
    "--kv-transfer-config": BY_HAND,
    "--worker-extension-cls": BY_HAND,
}
"""Options of vLLM that are not passed on, and what to use instead."""
# What a first try runs into: two servers, each of which wants nearly all of one machine's memory.
HINT = "see its output above; if memory ran out, limit each server: -- --kv-cache-memory-bytes 1073741824"


def serve_vllm(options: ServeOptions) -> int:
    """Run vLLM until it ends or we are told to end; returns its exit code, 0 when we were told.

    Raises ConfigurationError when its port is taken, it ends early or is not ready in time.
    """
    # vLLM does not say which port it got when it is asked for any, so we choose one. And whoever answers at a port that
    # vLLM cannot have would look like vLLM.
    with listening.reserve(options.host, options.port) as held:
        # vLLM takes no brackets, and looks for an IPv4 address only where it is given a name.
        host, port = held.getsockname()[:2]
        command, environment = vllm_command(replace(options, host=host), port), vllm_environment(options)
        engine = EngineProcess("vLLM", command, environment, listening.url_of(held), "/health", HINT)
        return serve_engine(options, engine)


def vllm_command(options: ServeOptions, port: int) -> list[str]:
    """The command line that starts vLLM with our connector. It names the token's file and not the token."""
    transfer = options.transfer
    chosen = {
        "digest": transfer.digest,
        "strategy": transfer.strategy,
        "staging_bytes": options.staging_mib << 20,
        "staging_memory": transfer.staging_memory,
        "transfer_direction": transfer.transfer_direction,
        "layer_wise": options.layer_wise,
        "host": options.transfer_host,
        "kv_lease_duration": options.lease_timeout,
        "token_file": options.token_file,
    }
    extra = {name: value for name, value in chosen.items() if value and value != DEFAULTS.get(name)}
    connector = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": options.engine_id,
        "kv_load_failure_policy": options.failure_policy,
        "kv_connector_extra_config": {"transport": transfer.transport, "port": options.transfer_port, **extra},
    }
    if transfer.buffer_device != "auto":
        connector["kv_buffer_device"] = transfer.buffer_device
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    command += ["--host", options.host, "--port", str(port), "--served-model-name", options.served_name]
    command += ["--dtype", options.dtype, "--kv-transfer-config", json.dumps(connector)]
    command += ["--middleware", MIDDLEWARE, "--worker-extension-cls", EXTENSION]
    command += ["--block-size", str(options.block_tokens)] if options.block_tokens else []
    command += ["--shutdown-timeout", str(ceil(options.drain_timeout))] if options.drain_timeout else []
    return [*command, *options.arguments]


def vllm_environment(options: ServeOptions) -> dict[str, str]:
    """Raises ConfigurationError for several keys."""
    hint = "pass several behind --, where everybody on this host can read them: -- --api-key A B"
    return {**os.environ, **key_in("VLLM_API_KEY", options, "vLLM", hint)}
