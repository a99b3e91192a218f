"""Servers of other engines beside SGLang's: of the same model, with caches that go either way."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from engine_server import VLLM_ON_CPU, EngineServer, hold_ports
from tiny_models import model_folder

__all__ = ["Other", "OtherSpec"]

NUM_CACHED_TOKENS = 16_384
# The embedded engine is in SGLang's environment; vLLM has one of its own, which `make test-vllm` makes.
PYTHONS = {"transformers": Path(sys.executable), "vllm": Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"}
# Engines on shared cores can be silent for a while without being lost.
TRANSFORMERS = ("--heartbeat", "10")
VLLM = (
    *("--engine", "vllm", "--", "--max-model-len", "8192", "--max-num-seqs", "16", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(128 << 20), "--max-num-batched-tokens", "1024"),
)


@dataclass(frozen=True, slots=True)
class OtherSpec:
    """An engine other than SGLang that prefills and decodes: what a test asks for."""

    engine: str
    model: str
    block_tokens: int

    @property
    def problem(self) -> str:
        """Why it cannot be started here; empty where it can."""
        python = PYTHONS[self.engine]
        return "" if python.exists() else f"no {self.engine} at {python}: see make test-{self.engine}"

    def __str__(self) -> str:
        return f"{self.engine}-{self.model}-block{self.block_tokens}"


class Other(EngineServer):
    """One running server. At `transfer_port` its rank 0 listens for agents: the bootstrap port of those who decode."""

    def __init__(self, spec: OtherSpec, log: Path) -> None:
        super().__init__(spec.engine, log)
        self.spec = spec
        self.transfer_port = hold_ports(self.held)

    def environment(self) -> dict[str, str]:
        return VLLM_ON_CPU

    def command(self) -> list[str]:
        spec = self.spec
        num_blocks = ("--num-blocks", str(NUM_CACHED_TOKENS // spec.block_tokens))
        return [
            *(str(PYTHONS[spec.engine]), "-m", "kvferry", "serve", "--model", str(model_folder(spec.model))),
            *("--dtype", "float32", "--served-name", "tiny", "--failure-policy", "fail"),
            *("--port", str(self.port), "--transfer-port", str(self.transfer_port)),
            *("--block-tokens", str(spec.block_tokens)),
            *(VLLM if spec.engine == "vllm" else (*num_blocks, *TRANSFORMERS)),
        ]
