"""`kvferry serve --engine vllm`: starts `vllm serve` with our connector, for people who do not want to write JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from asyncio.subprocess import Process
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

from kvferry import SharedToken, read_token
from kvferry.cli import console
from kvferry.cli.options import HERE
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.joining import joined
from kvferry.cli.server import http, listening
from kvferry.errors import ConfigurationError

READY_S = 600.0
POLL_S = 0.25
# Less than our own parent gives us before it kills us: nobody else would end vLLM then.
STOP_S = 8.0
# What our router asks of an engine, on vLLM's own server.
MIDDLEWARE = "kvferry.connectors.vllm_middleware.FerryMiddleware"
# What the connector does if it is not told.
DEFAULTS = {"digest": "sampled", "strategy": "auto", "transfer_direction": "auto", "host": HERE}
EXTENSION = "kvferry.connectors.vllm.extension.Extension"


def serve_vllm(options: ServeOptions) -> int:
    """Run vLLM until it ends or we are told to end; returns its exit code, 0 when we were told.

    Raises ConfigurationError when its port is taken, it ends early or is not ready in time.
    """
    # vLLM does not say which port it got when it is asked for any, so we choose one. And whoever answers at a port that
    # vLLM cannot have would look like vLLM.
    with listening.reserve(options.host, options.port) as held:
        return asyncio.run(_run(options, held, read_token(options.token_file)))


async def _run(options: ServeOptions, held: socket.socket, token: SharedToken) -> int:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    # vLLM takes no brackets, and looks for an IPv4 address only where it is given a name.
    host, port = held.getsockname()[:2]
    # A group of its own: Ctrl-C reaches it through us only, and what it leaves behind can be ended with it. Not a
    # session: Linux schedules sessions as wholes, and lets one that rarely runs wait for a tenth of a second and more.
    process = await asyncio.create_subprocess_exec(
        *vllm_command(replace(options, host=host), port),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        process_group=0,
        env=vllm_environment(options),
    )
    ends = [process.wait(), told.wait(), *([http.stdin_closed()] if options.as_child else [])]
    ending = asyncio.create_task(_first(ends))
    try:
        url = listening.url_of(held)
        await _ready(process, ending, url)
        if not ending.done():
            name, model = options.engine_id, options.served_name
            words = f"{name}: {model} at {url}/v1, served by vLLM"
            console.announce(options.as_json, words, engine_id=name, model=model, url=url)
            async with joined(options.join, url, token):
                await ending
        return process.returncode or 0
    finally:
        ending.cancel()
        await _stop(process, options.drain_timeout + STOP_S)


def vllm_command(options: ServeOptions, port: int) -> list[str]:
    """The command line that starts vLLM with our connector. It names the token's file and not the token."""
    transfer = options.transfer
    chosen = {
        "digest": transfer.digest,
        "strategy": transfer.strategy,
        "staging_bytes": options.staging_mib << 20,
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
    """vLLM takes a key from there as well: everybody on this host can read command lines.

    Raises ConfigurationError for several keys, of which it takes one there.
    """
    keys = options.http_access.api_keys
    if len(keys) > 1:
        raise ConfigurationError(
            "vLLM takes one --api-key from kvferry",
            found=f"{len(keys)} keys",
            hint="pass several behind --, where everybody on this host can read them: -- --api-key A B",
        )
    return {**os.environ, **dict(zip(["VLLM_API_KEY"], keys, strict=False))}


async def _first(ends: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Returns when one of them has."""
    tasks = [asyncio.create_task(end) for end in ends]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _ready(process: Process, ending: asyncio.Task[None], url: str) -> None:
    """Returns when vLLM answers, or when we were told to end. Raises ConfigurationError when it has ended itself."""
    deadline = time.monotonic() + READY_S
    while not await asyncio.to_thread(_is_healthy, url):
        await asyncio.wait({ending}, timeout=POLL_S)
        if process.returncode is not None:
            # What a first try runs into: two servers, each of which wants nearly all of one machine's memory.
            hint = "see its output above; if memory ran out, limit each server: -- --kv-cache-memory-bytes 1073741824"
            raise ConfigurationError("vLLM has exited", found=f"exit code {process.returncode}", hint=hint)
        if ending.done():
            return
        if time.monotonic() > deadline:
            raise ConfigurationError("vLLM did not become ready in time", expected=f"within {READY_S:g} s")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=POLL_S * 4) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _stop(process: Process, within_s: float) -> None:
    """Politely, then by force; nothing of its group survives."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
