"""Which pairs of servers the installed vLLM cannot run; the table in docs/vllm.md says what each version lacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from servers import PairSpec

RECURRENT = ("nemotron_h", "falcon_h1")
FORGETFUL = ("mistral", "gemma3", "mellum", *RECURRENT)
# What came with a version, and which pairs need it.
CAME: tuple[tuple[tuple[int, int], str, Callable[[PairSpec], bool]], ...] = (
    ((0, 30), "caches with windows and states", lambda spec: spec.model.startswith(FORGETFUL)),
    ((0, 31), "adapters by their content", lambda spec: "--enable-lora" in spec.prefill.flags),
    ((0, 32), "recurrent models in float32 on the CPU", lambda spec: spec.model.startswith(RECURRENT)),
)


def lack(spec: PairSpec) -> str:
    """What the installed vLLM lacks for a pair; empty where there is nothing."""
    version = metadata.version("vllm").split(".")
    found = int(version[0]), int(version[1])
    lacking = [f"{what}: since {since[0]}.{since[1]}" for since, what, needs in CAME if found < since and needs(spec)]
    return ", ".join(lacking)
