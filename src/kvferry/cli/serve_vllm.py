"""`kvferry serve --engine vllm`: starts `vllm serve` with our connector, for people who do not want to write JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec

from kvferry.cli import console, http
from kvferry.errors import ConfigurationError

__all__ = ["VllmOptions", "serve_vllm", "vllm_command"]

READY_S = 600.0
POLL_S = 0.25
STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What to serve and where. `block_tokens` 0 leaves it to vLLM; `arguments` go to `vllm serve` as they are."""

    model: str
    served_name: str
    engine_id: str
    transport: str
    block_tokens: int
    dtype: str
    failure_policy: str
    host: str
    port: int
    transfer_port: int
    arguments: tuple[str, ...]
    as_json: bool
    as_child: bool


def serve_vllm(options: VllmOptions) -> int:
    """Run vLLM until it ends or we are told to; returns its exit code.

    Raises ConfigurationError when it is not installed, ends early or is not ready in time.
    """
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "vLLM is not installed here",
            found=sys.executable,
            expected="an environment with vllm 0.32",
            hint="install kvferry into vLLM's environment: pip install 'kvferry[agent,cli]'",
        )
    port = options.port or _free_port(options.host)
    process = subprocess.Popen(vllm_command(options, port), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: process.terminate())
        url = f"http://{options.host}:{port}"
        _await(process, url)
        _announce(options, url)
        return _watch(process, options.as_child)
    finally:
        _stop(process)


def vllm_command(options: VllmOptions, port: int) -> list[str]:
    """The command line that starts vLLM with our connector."""
    transfer = {
        "kv_connector": "FerryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": "kv_both",
        "engine_id": options.engine_id,
        "kv_load_failure_policy": options.failure_policy,
        "kv_connector_extra_config": {"transport": options.transport, "port": options.transfer_port},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    command += ["--host", options.host, "--port", str(port), "--served-model-name", options.served_name]
    command += ["--dtype", options.dtype, "--kv-transfer-config", json.dumps(transfer)]
    command += ["--block-size", str(options.block_tokens)] if options.block_tokens else []
    return [*command, *options.arguments]


def _free_port(host: str) -> int:
    """vLLM does not say which port it got when it is asked for any, so we choose one."""
    with http.listen(host, 0) as bound:
        number: int = bound.getsockname()[1]
        return number


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while not _is_healthy(url):
        if process.poll() is not None:
            hint = "its own words are above; arguments after -- go to vllm serve as they are"
            raise ConfigurationError("vLLM has ended", found=f"exit code {process.returncode}", hint=hint)
        if time.monotonic() > deadline:
            raise ConfigurationError("vLLM is not ready in time", expected=f"within {READY_S:g} s")
        time.sleep(POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=POLL_S * 4) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _announce(options: VllmOptions, url: str) -> None:
    facts = {"event": "ready", "engine_id": options.engine_id, "model": options.served_name, "url": url}
    if options.as_json:
        console.data(facts)
    else:
        console.say(f"{options.engine_id}: {options.served_name} at {url}/v1, served by vLLM")


def _watch(process: subprocess.Popen[bytes], as_child: bool) -> int:
    """Until vLLM ends; as a child, the end of standard input, which comes when the parent dies, makes it end."""
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            readable, _, _ = select.select([sys.stdin] if as_child else [], [], [], 0)
            if readable and not os.read(sys.stdin.fileno(), 4096):
                process.terminate()
                return process.wait(STOP_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
