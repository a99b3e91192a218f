"""Prefill on one real vLLM server, decode on another: every answer must be the one a single server gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from answers import check_equal, prompts_of, wait_until_free
from servers import DEVICE, PLAIN, PairSpec, ServerSpec

# Below a block, exactly blocks, one more, and sizes that no block divides.
SIZES = (2, 5, 63, 64, 65, 127, 128, 129, 300, 1000)
# Two ranks on one side make every request slow on few cores.
MIXED_SIZES = (2, 64, 65, 129, 300, 700)
FEW_SIZES = (5, 128, 300, 700)
LONG_SIZE = 5000
# Well below a lease: every rank of the source has been told, and none waits for the lease to end.
TOLD_S = 15.0
MODELS = ("llama", "qwen3", "mistral", "gemma3", "deepseek_v2", "deepseek_v3", "nemotron_h", "falcon_h1")
FEW_GROUPS = ("nemotron_h_one_group", "falcon_h1_one_group")
UNEQUAL_BLOCKS = ((64, 128), (128, 64), (32, 128), (128, 32))
# Twice what vLLM gives the tiny hybrids when it may choose.
HYBRID_BLOCK = 1024
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])


def two_way(model: str, tps: tuple[int, int] = (1, 1), blocks: tuple[int, int] = (0, 0)) -> PairSpec:
    """Both sides can send and receive: one pair of servers shows both directions."""
    return PairSpec(model, *(ServerSpec("kv_both", tp, size) for tp, size in zip(tps, blocks, strict=True)))


def one_way(model: str, tp: int) -> PairSpec:
    return PairSpec(model, ServerSpec("kv_producer", tp), ServerSpec("kv_consumer", tp))


UNEQUAL = two_way("llama", blocks=(64, 128))
SMOKE = (PLAIN, one_way("gemma3", 1), one_way("deepseek_v3", 1), one_way("nemotron_h", 1))
SAME_TP = [one_way(*both) for both in product(MODELS + FEW_GROUPS, (1, 2)) if one_way(*both) not in SMOKE]
OTHER_TP = [two_way(model, (2, 1)) for model in MODELS + FEW_GROUPS]
OTHER_BLOCKS = [
    *(two_way(model, blocks=blocks) for model, blocks in product(("llama", "gemma3"), ((64, 128), (32, 128)))),
    *(two_way(model, (2, 1), blocks) for model, blocks in product(("llama", "gemma3"), UNEQUAL_BLOCKS)),
    two_way("deepseek_v3", blocks=(16, 32)),
    two_way("nemotron_h", blocks=(0, HYBRID_BLOCK)),
    two_way("falcon_h1", blocks=(0, HYBRID_BLOCK)),
]
TRANSPORTS = [
    replace(PLAIN, buffer_device=buffer_device, extra=(("transport", name),))
    for name, buffer_device in (("cma", "cpu"), ("tcp", "cpu"), ("nixl", DEVICE))
]
PUSHING = [
    replace(PLAIN, extra=(("transfer_direction", "push"), ("strategy", "direct"))),
    replace(two_way("llama", (2, 1), (64, 128)), extra=(("transfer_direction", "push"), ("strategy", "direct"))),
]
STAGED = [replace(two_way("llama", (2, 1), (64, 128)), extra=(("strategy", name),)) for name in ("scatter", "pack")]
LONG = [replace(PLAIN, decode=ServerSpec("kv_consumer", 2)), one_way("mistral", 1), one_way("falcon_h1", 1)]


@pytest.mark.parametrize("spec", SMOKE, ids=str)
def test_answers_equal_a_single_servers(pair, spec):
    check_equal(pair, prompts_of(SIZES))


@pytest.mark.parametrize("spec", [UNEQUAL], ids=str)
@DIRECTIONS
def test_block_sizes_differ(pair, spec, reverse):
    check_equal(pair, prompts_of(SIZES), reverse=reverse)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_prompt_of_several_thousand_tokens_in_chunks(pair, spec):
    check_equal(pair, prompts_of((LONG_SIZE,)))


@pytest.mark.parametrize("spec", [PLAIN, UNEQUAL], ids=str)
def test_eight_requests_at_once(pair, spec):
    check_equal(pair, prompts_of(FEW_SIZES * 2), at_once=8)


@pytest.mark.parametrize("spec", [replace(UNEQUAL, extra=(("strategy", "pack"),))], ids=str)
def test_everything_packed(pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4, reverse=True)


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize("spec", STAGED, ids=lambda spec: f"{spec}-{dict(spec.extra)['strategy']}")
def test_through_staging_memory_over_unequal_tensor_parallel_sizes(pair, spec, reverse):
    check_equal(pair, prompts_of(MIXED_SIZES), reverse=reverse)
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4, reverse=reverse)


@pytest.mark.full
@pytest.mark.parametrize("spec", SAME_TP, ids=str)
def test_every_model_over_equal_tensor_parallel_sizes(pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4)
    wait_until_free(pair.servers, TOLD_S)


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize("spec", OTHER_TP, ids=str)
def test_every_model_over_unequal_tensor_parallel_sizes(pair, spec, reverse):
    check_equal(pair, prompts_of(MIXED_SIZES), reverse=reverse)
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4, reverse=reverse)
    wait_until_free(pair.servers, TOLD_S)


@pytest.mark.full
@DIRECTIONS
@pytest.mark.parametrize("spec", OTHER_BLOCKS, ids=str)
def test_block_sizes_and_tensor_parallel_sizes_differ(pair, spec, reverse):
    check_equal(pair, prompts_of(MIXED_SIZES), reverse=reverse)


@pytest.mark.full
@pytest.mark.parametrize("spec", LONG, ids=str)
def test_several_thousand_tokens_in_other_shapes(pair, spec):
    check_equal(pair, prompts_of((2000, LONG_SIZE)))


@pytest.mark.full
@pytest.mark.parametrize("spec", TRANSPORTS, ids=lambda spec: str(spec.extra[0][1]))
def test_every_transport(pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(FEW_SIZES * 2, seed=1), at_once=8)


@pytest.mark.full
@pytest.mark.parametrize("spec", PUSHING, ids=str)
def test_the_prefill_engine_writes(pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(FEW_SIZES * 2, seed=1), at_once=8)
    wait_until_free(pair.servers, TOLD_S)
