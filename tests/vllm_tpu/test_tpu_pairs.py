"""Prefill on one server, decode on another, one of them or both with tpu-inference: every answer must be the one that a
single server gives."""

from __future__ import annotations

import pytest
from engine_server import is_installed

if not is_installed("tpu_inference"):
    pytest.skip("tpu-inference is not installed: see make test-vllm-tpu", allow_module_level=True)

from answers import alone, check_equal, loaded_tokens, prompts_of, wait_until_free
from crossing import Prompt, body, get, post, route, streamed
from proxy import ask, ask_disaggregated
from tpu_servers import BLOCK_TOKENS, CHUNK_TOKENS, ON_CPU, TpuPair

# Below a block, exactly blocks, one more, the largest step, and what is computed in several.
SIZES = (2, 5, 31, 32, 33, 64, CHUNK_TOKENS, CHUNK_TOKENS + 1, 300, 700)
FEW_SIZES = (5, 64, 129, 500)
# Well below a lease.
TOLD_S = 15.0
BYTES = "vllm:nixl_bytes_transferred_sum"

PLAIN = TpuPair("llama")
DIVIDED = TpuPair("llama_narrow", (2, 32), (1, 64))
REPLICATED = TpuPair("llama_narrow", (4, 32), (2, 16))
WITH_CPU = TpuPair("llama", (1, 32), ON_CPU)
NARROW_WITH_CPU = TpuPair("llama_narrow", (2, 32), ON_CPU)


def full(spec):
    return pytest.param(spec, marks=pytest.mark.full)


DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])


@pytest.fixture
def pair(running, spec):
    """The two servers of the test's `spec`, both ready; the same ones for the next test with an equal `spec`."""
    return running.pair(spec)


@DIRECTIONS
@pytest.mark.parametrize("spec", [PLAIN, DIVIDED, full(REPLICATED), full(TpuPair("qwen3"))], ids=str)
def test_answers_between_two_of_tpu_inference_equal_a_single_servers(pair, spec, reverse):
    check_equal(pair, prompts_of(SIZES), reverse=reverse)
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4, reverse=reverse)
    wait_until_free(pair.servers, TOLD_S)


@DIRECTIONS
@pytest.mark.parametrize("spec", [WITH_CPU, full(NARROW_WITH_CPU)], ids=str)
def test_answers_between_tpu_inference_and_vllm_on_the_cpu_equal_a_single_servers(pair, spec, reverse):
    check_equal(pair, prompts_of(SIZES), reverse=reverse)
    check_equal(pair, prompts_of(FEW_SIZES, seed=1), at_once=4, reverse=reverse)
    wait_until_free(pair.servers, TOLD_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_of_a_prompt_whose_beginning_is_cached_only_the_rest_is_moved(pair, spec):
    (question,) = prompts_of((300,))
    ask(pair.decode, question)
    tokens, moved = loaded_tokens(pair.decode), pair.decode.metric(BYTES)
    longer = type(question)((*question.prompt, *range(50, 150)), question.salt)
    answer = ask_disaggregated(pair.prefill, pair.decode, longer)
    cached = 300 // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaded_tokens(pair.decode) - tokens == 399 - cached
    # Four layers with four heads of 64 dims in float32, keys and values, in whole blocks.
    num_blocks = -(-399 // BLOCK_TOKENS) - cached // BLOCK_TOKENS
    assert pair.decode.metric(BYTES) - moved == num_blocks * BLOCK_TOKENS * 4 * 4 * 64 * 4 * 2
    assert answer.tokens == ask(pair.prefill, longer).tokens


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_our_router_finds_and_pairs_them(pair, spec, tmp_path):
    (question,) = prompts_of((300,))
    prompt = Prompt(question.prompt, question.salt)
    with route(pair.prefill.url, pair.decode.url, tmp_path / "router.log") as url:
        answer = post(url, body(prompt, prompt.num_tokens))
        members = get(f"{url}/kvferry/members")["members"]
    assert len({member["cache"] for member in members} - {""}) == 1
    assert (answer["cache"], answer["path"]) == ("received", "disaggregated")
    assert tuple(answer["choices"][0]["token_ids"]) == ask(pair.decode, alone(question)).tokens


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_cache_leaves_while_its_prompt_is_computed(pair, spec):
    (question,) = prompts_of((700,))
    prompt = Prompt(question.prompt, question.salt)
    early = {"do_remote_decode": True, "kvferry": {"early": True}}
    with streamed(pair.prefill.url, body(prompt, 1) | {"stream": True, "kv_transfer_params": early}) as events:
        params = next(events)["kv_transfer_params"]
        headers = {"X-Request-Id": "early"}
        answer = post(pair.decode.url, body(prompt, 12) | {"kv_transfer_params": params}, headers=headers)
        assert any(event["choices"] for event in events)
    assert answer["cache"] == "received"
    assert tuple(answer["choices"][0]["token_ids"]) == ask(pair.decode, alone(question)).tokens
