"""Real `vllm serve` processes on loopback ports: started, awaited, read, and always ended."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_server import POLL_S, START_S, VLLM_ON_CPU, EnginePair, EngineServer, StartError, hold_ports
from tiny_models import MODELS, model_folder

__all__ = ["DEVICE", "PLAIN", "Pair", "PairSpec", "Server", "ServerSpec", "StartError"]

# What vLLM computes on: `cuda` where its GPU build is installed (CONTRIBUTING.md has the command).
DEVICE = os.environ.get("KVFERRY_VLLM_DEVICE", "cpu")
# Triton would multiply float32 in a shorter format. All servers of all tests may share one GPU.
VLLM_ON_GPU = {"TRITON_F32_DEFAULT": "ieee"}
GPU_FLAGS = ("--gpu-memory-utilization", "0.04")

MOST_RANKS = 2
# Where vLLM finds the connectors that it does not bring. The second is a benchmark's, in `benchmarks/nothing_moves`.
MODULES = {"FerryConnector": "kvferry.connectors.vllm", "NothingMoves": "nothing_moves"}
# What our router asks of an engine, on vLLM's own server.
MIDDLEWARE = (
    *("--middleware", "kvferry.connectors.vllm_middleware.FerryMiddleware"),
    *("--worker-extension-cls", "kvferry.connectors.vllm.extension.Extension"),
)
CACHE_BYTES = 128 << 20
NUM_GUESSES = 3
ENVIRONMENT = {
    **VLLM_ON_CPU,
    **VLLM_ON_GPU,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # For /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One side of a pair. `block_tokens` 0 leaves the model's own; `flags` come last on the command line. `extra` are
    settings and `environment` are variables of this side alone. `speculator` guesses tokens: `ngram`, or a model."""

    role: str
    tp: int = 1
    block_tokens: int = 0
    flags: tuple[str, ...] = ()
    cache_bytes: int = CACHE_BYTES
    extra: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    speculator: str = ""


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Two servers of one model: what a test asks for, and the key under which a running pair is reused. With `together`
    each server has several connectors, of these names and in this order."""

    model: str
    prefill: ServerSpec = ServerSpec("kv_producer")
    decode: ServerSpec = ServerSpec("kv_consumer")
    failure_policy: str = "fail"
    lease_s: int = 60
    extra: tuple[tuple[str, Any], ...] = ()
    buffer_device: str = DEVICE
    dtype: str = ""
    together: tuple[str, ...] = ()

    @property
    def computes_in(self) -> str:
        """The dtype of weights and caches."""
        own = "float32" if DEVICE == "cpu" else MODELS[self.model].gpu_dtype
        return self.dtype or own

    def __str__(self) -> str:
        blocks = f"block{self.prefill.block_tokens or 'own'}to{self.decode.block_tokens or 'own'}"
        return f"{self.model}-tp{self.prefill.tp}to{self.decode.tp}-{blocks}-{self.failure_policy}"


# What most tests use; several of them together cost one start. Long prompts are computed in chunks there.
PLAIN = PairSpec("llama", ServerSpec("kv_producer", flags=("--max-num-batched-tokens", "1024")), lease_s=15)


class Server(EngineServer):
    """One running `vllm serve`, and the ports of its side channel."""

    def __init__(self, pair: PairSpec, spec: ServerSpec, connector: str, log: Path) -> None:
        super().__init__(spec.role, log)
        self.pair, self.spec, self.connector = pair, spec, connector
        self.side_port = hold_ports(self.held, MOST_RANKS)

    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port), **dict(self.spec.environment)}

    def wait_until_ready(self) -> None:
        """And has answered once: vLLM compiles at its first steps, which on busy cores can take longer than a lease
        lasts."""
        super().wait_until_ready()
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=START_S) as response:
            response.read()

    def forget_prefixes(self, within_s: float) -> None:
        """Empty its prefix cache, which takes until blocks in use are free. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"", method="POST")
            with urllib.request.urlopen(request, timeout=60) as response:
                if json.load(response)["success"]:
                    return
            time.sleep(POLL_S)
        raise TimeoutError(f"blocks of the {self.spec.role} are in use after {within_s:.0f} s")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; raises KeyError when the server has none of that name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        if not values:
            raise KeyError(f"no metric {name} on {self.url}")
        return sum(values)

    def command(self) -> list[str]:
        model = MODELS[self.pair.model]
        block_tokens = self.spec.block_tokens or model.block_tokens
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_folder(self.pair.model))),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"),
            *("--max-model-len", "8192", "--max-num-seqs", "16", "--dtype", self.pair.computes_in, "--seed", "0"),
            *("--kv-cache-memory-bytes", str(self.spec.cache_bytes), "--enforce-eager"),
            *("--tensor-parallel-size", str(self.spec.tp)),
            *(("--block-size", str(block_tokens)) if block_tokens else ()),
            *("--kv-transfer-config", json.dumps(self._transfer_settings())),
            *(MIDDLEWARE if self.connector == "FerryConnector" else ()),
            *(model.cpu_flags if DEVICE == "cpu" else GPU_FLAGS),
            *(("--speculative-config", json.dumps(self._speculation())) if self.spec.speculator else ()),
            *self.spec.flags,
        ]

    def _speculation(self) -> dict[str, Any]:
        if self.spec.speculator == "ngram":
            return {"method": "ngram", "num_speculative_tokens": NUM_GUESSES, "prompt_lookup_max": 4}
        folder = str(model_folder(self.spec.speculator))
        return {"method": "draft_model", "model": folder, "num_speculative_tokens": NUM_GUESSES}

    def _transfer_settings(self) -> dict[str, Any]:
        if not self.pair.together:
            return self._connector_settings()
        storage = {"shared_storage_path": str(self.log.with_suffix(".storage"))}
        other = {"kv_role": "kv_both", "kv_connector_extra_config": storage}
        children = [
            self._connector_settings() if name == self.connector else {"kv_connector": name, **other}
            for name in self.pair.together
        ]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": self.spec.role,
            "kv_load_failure_policy": self.pair.failure_policy,
            "kv_connector_extra_config": {"connectors": children},
        }

    def _connector_settings(self) -> dict[str, Any]:
        module = MODULES.get(self.connector)
        return {
            "kv_connector": self.connector,
            **({"kv_connector_module_path": module} if module else {}),
            "kv_role": self.spec.role,
            "kv_buffer_device": self.pair.buffer_device,
            "kv_load_failure_policy": self.pair.failure_policy,
            "kv_connector_extra_config": {
                "kv_lease_duration": self.pair.lease_s,
                **dict(self.pair.extra + self.spec.extra),
            },
        }


@dataclass(frozen=True, slots=True)
class Pair(EnginePair):
    """A prefill and a decode server of one model, both ready."""

    spec: PairSpec
    prefill: Server
    decode: Server

    @classmethod
    def create(cls, spec: PairSpec, connector: str, folder: Path) -> Pair:
        sides = (("prefill", spec.prefill), ("decode", spec.decode))
        return cls(spec, *(Server(spec, side, connector, folder / f"{name}.log") for name, side in sides))

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode
