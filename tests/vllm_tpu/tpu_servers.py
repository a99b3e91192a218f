"""Pairs of servers of which one or both are tpu-inference's, on JAX's CPU platform."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tpu_on_cpu
from servers import Pair, PairSpec, Server, ServerSpec

__all__ = ["ON_CPU", "VLLM_PYTHON", "Running", "TpuPair"]

FOLDER = Path(__file__).parent
# Another environment has vLLM's CPU build: tpu-inference needs a torch that is older, and a Python that is newer.
VLLM_PYTHON = Path(os.environ.get("KVFERRY_VLLM_PYTHON", FOLDER.parents[1] / ".venv-vllm/bin/python"))
# The largest step: whatever is longer is computed in chunks.
CHUNK_TOKENS = 128
BLOCK_TOKENS = 32
# About as long as tpu-inference compiles at the first steps of a kind: no lease may end for that.
LEASE_S = 5


@dataclass(frozen=True, slots=True)
class TpuPair:
    """A pair that a test asks for: on each side, how many devices a server of tpu-inference has, and the size of its
    blocks; or `ON_CPU`, for vLLM's own CPU build."""

    model: str
    prefill: tuple[int, int] = (1, BLOCK_TOKENS)
    decode: tuple[int, int] = (1, BLOCK_TOKENS)

    def __str__(self) -> str:
        sides = ("cpu" if side == ON_CPU else f"tp{side[0]}block{side[1]}" for side in (self.prefill, self.decode))
        return f"{self.model}-{'-'.join(sides)}"


ON_CPU = (0, 128)


class TpuServer(Server):
    """One running `vllm serve` with tpu-inference."""

    plugins = Path()

    def environment(self) -> dict[str, str]:
        path = [str(self.plugins), str(FOLDER), os.environ.get("PYTHONPATH", "")]
        return {
            **super().environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.spec.tp}",
            "MODEL_IMPL_TYPE": "flax_nnx",
        }

    def command(self) -> list[str]:
        devices = {"sharding": {"sharding_strategy": {"device_indexes": [*range(self.spec.tp)]}}}
        return [
            *super().command(),
            *("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--additional-config", json.dumps(devices)),
        ]

    def _connector_settings(self) -> dict[str, Any]:
        names = {"kv_connector": "TPUConnector", "kv_connector_module_path": "kvferry.connectors.vllm_tpu"}
        return {**super()._connector_settings(), **names}


class CpuServer(Server):
    """One running `vllm serve` of the CPU build, in its own environment."""

    def command(self) -> list[str]:
        return [str(VLLM_PYTHON), *super().command()[1:], "--max-model-len", "1024"]


@dataclass
class Running:
    """The one pair that runs: a machine of two cores has room for no second."""

    logs: pytest.TempPathFactory
    pairs: list[tuple[TpuPair, Pair]] = field(default_factory=list)

    def pair(self, wanted: TpuPair) -> Pair:
        for spec, pair in self.pairs:
            if spec == wanted and all(server.healthy() for server in pair.servers):
                return pair
        self.stop()
        pair = _pair(wanted, self.logs.mktemp(str(wanted)))
        pair.start()
        self.pairs.append((wanted, pair))
        return pair

    def stop(self) -> None:
        while self.pairs:
            self.pairs.pop()[1].stop()


def _pair(wanted: TpuPair, folder: Path) -> Pair:
    if ON_CPU in (wanted.prefill, wanted.decode) and not VLLM_PYTHON.exists():
        pytest.skip(f"{VLLM_PYTHON} is not there: see make .venv-vllm/ready")
    sides = [ServerSpec("kv_both", tp or 1, block) for tp, block in (wanted.prefill, wanted.decode)]
    spec = replace(PairSpec(wanted.model, *sides), buffer_device="cpu", lease_s=LEASE_S)
    tpu_on_cpu.write_plugin(folder)
    servers = []
    for name, side, wanted_side in zip(("prefill", "decode"), sides, (wanted.prefill, wanted.decode), strict=True):
        made = (CpuServer if wanted_side == ON_CPU else TpuServer)(spec, side, "FerryConnector", folder / f"{name}.log")
        if isinstance(made, TpuServer):
            made.plugins = folder
        servers.append(made)
    return Pair(spec, *servers)
