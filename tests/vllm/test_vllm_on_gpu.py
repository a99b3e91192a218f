"""vLLM as it runs on a GPU: FlashAttention's caches, CUDA graphs, blocks of unequal sizes, memory that is read where it
lies or through the host. Whatever else is in this folder runs there too: KVFERRY_VLLM_DEVICE=cuda."""

from __future__ import annotations

import pytest
from answers import check_equal, prompts_of, wait_until_free
from servers import DEVICE, PairSpec, ServerSpec

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE == "cpu", reason="vLLM computes on a CPU here: see KVFERRY_VLLM_DEVICE"),
]
SIZES = (2, 15, 16, 17, 63, 64, 65, 300, 1000)
FEW_SIZES = (5, 128, 300, 700)
LONG_SIZE = 5000
FREE_S = 15.0
GRAPHS = ("--no-enforce-eager", "--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')


def flash(model: str, buffer_device: str, **extra: str) -> PairSpec:
    sides = (ServerSpec("kv_both", block_tokens=size, flags=GRAPHS) for size in (16, 64))
    return PairSpec(model, *sides, dtype="bfloat16", buffer_device=buffer_device, extra=tuple(extra.items()))


SPECS = [
    flash("llama", "cuda"),
    flash("gemma3", "cuda"),
    flash("llama", "cpu"),
    flash("llama", "cuda", transport="nixl", transfer_direction="push"),
]


@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec}-{spec.buffer_device}")
def test_answers_equal_a_single_servers(pair, spec, reverse):
    check_equal(pair, prompts_of(SIZES), reverse=reverse)
    check_equal(pair, prompts_of((LONG_SIZE,), seed=1), reverse=reverse)
    check_equal(pair, prompts_of(FEW_SIZES * 2, seed=2), at_once=8, reverse=reverse)
    wait_until_free(pair.servers, FREE_S)
