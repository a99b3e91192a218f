"""Real SGLang servers on the CPU: a prefill and a decode server of one model, whose caches kvferry moves."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from engine_server import EnginePair, EngineServer, hold_ports
from tiny_models import model_folder

STAND_INS = Path(__file__).parent / "stand_ins"
LEASE_S = 15.0
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KVFERRY_SGLANG_CONFIG": json.dumps({"lease_s": LEASE_S}),
}


def environment() -> dict[str, str]:
    """Of every server; where modules are looked for is added to what that is already."""
    path = os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**ENVIRONMENT, "PYTHONPATH": path}


# With overlap scheduling SGLang makes a CUDA event when a prefix is cached, which ends a prefill server on the CPU.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"),
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
FLAGS = (*CPU_FLAGS, "--dtype", "float32", "--disaggregation-transfer-backend", "kvferry")


@dataclass(frozen=True, slots=True)
class SideSpec:
    """One side of a pair; `flags` come last on the command line. Data parallelism is of `dp` engines, or of `attn_dp`
    that share the layers that are no attention."""

    page_tokens: int = 16
    tp: int = 1
    pp: int = 1
    dp: int = 1
    attn_dp: int = 1
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Two servers of one model: what a test asks for, and the key under which a running pair is reused."""

    model: str
    prefill: SideSpec = field(default_factory=SideSpec)
    decode: SideSpec = field(default_factory=SideSpec)

    def __str__(self) -> str:
        sides = self.prefill, self.decode
        names = ("tp", "pp", "dp", "attn_dp", "page_tokens")
        tp, *others, pages = ("to".join(str(getattr(side, name)) for side in sides) for name in names)
        more = "".join(f"-{name}{both}" for name, both in zip(names[1:], others, strict=False) if both != "1to1")
        return f"{self.model}-tp{tp}{more}-page{pages}"


class SGLangServer(EngineServer):
    """One running server. `bootstrap_port` is where its rank 0 listens, if it prefills."""

    def __init__(self, mode: str, model: str, spec: SideSpec, log: Path) -> None:
        # A request to /health is a prompt, which takes a second.
        super().__init__(mode, log, "/v1/models")
        self.mode, self.model, self.spec = mode, model, spec
        self.bootstrap_port = hold_ports(self.held, spec.dp * spec.attn_dp)

    def environment(self) -> dict[str, str]:
        cores = "|".join("01"[number % 2] for number in range(self.spec.tp * self.spec.pp * self.spec.dp))
        return {**environment(), "SGLANG_CPU_OMP_THREADS_BIND": cores}

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_folder(self.model))),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--tp", str(self.spec.tp), "--pp-size", str(self.spec.pp)),
            *("--dp-size", str(self.spec.dp), "--attn-dp-size", str(self.spec.attn_dp)),
            *("--page-size", str(self.spec.page_tokens), "--disaggregation-mode", self.mode),
            *("--disaggregation-bootstrap-port", str(self.bootstrap_port)),
            *FLAGS,
            *self.spec.flags,
        ]


class Pair(EnginePair):
    """A prefill and a decode server of one model, both ready."""

    def __init__(self, spec: PairSpec, logs: Path) -> None:
        self.spec = spec
        self.prefill = SGLangServer("prefill", spec.model, spec.prefill, logs / "prefill.log")
        self.decode = SGLangServer("decode", spec.model, spec.decode, logs / "decode.log")

    @property
    def servers(self) -> tuple[SGLangServer, SGLangServer]:
        return self.prefill, self.decode
