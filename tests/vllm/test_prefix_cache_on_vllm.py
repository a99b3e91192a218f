"""What vLLM puts into its prefix cache of a fetched prompt is right for others: real servers, every kind of cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from answers import alone, judge, prompts_of, wait_until_free
from proxy import Question, ask, ask_disaggregated, post_body, prefill
from servers import Pair, PairSpec, ServerSpec

FREE_S = 60.0
BLOCK = 64
HITS = "vllm:prefix_cache_hits_total"
# Windows share one cache group with layers that have none.
MERGED = ("--disable-hybrid-kv-cache-manager",)


def spec_of(model: str, blocks: tuple[int, int] = (BLOCK, BLOCK), flags: tuple[str, ...] = ()) -> PairSpec:
    prefill, decode = blocks
    return PairSpec(model, ServerSpec("kv_producer", 1, prefill, flags), ServerSpec("kv_consumer", 1, decode, flags))


WINDOWS = [
    spec_of("gemma3", flags=MERGED),
    spec_of("gemma3", (32, 128)),
    spec_of("gemma3", (128, 32)),
    spec_of("mistral"),
]
OTHERS = [spec_of("llama"), spec_of("deepseek_v3"), spec_of("nemotron_h", (0, 0)), spec_of("falcon_h1", (0, 0))]


def check_from_prefix_cache(pair: Pair, question: Question) -> None:
    """Ask the decode server alone, which may have some of the prompt cached."""
    before = pair.decode.metric(HITS)
    found = ask(pair.decode, question)
    hits = pair.decode.metric(HITS) - before
    problem = judge(pair.prefill, pair.decode, question, found).problem
    assert not problem, f"with {hits:.0f} tokens from the prefix cache, {problem}"


def check_others(pair: Pair, sizes: tuple[int, ...] = (200, 300, 321, 500, 700)) -> None:
    """The windows of Gemma 3 and Mistral here are 192 tokens: some prompts are a little longer, some far."""
    for each in prompts_of((700, 600, 500), seed=9):
        ask(pair.decode, each)  # Blocks hold something of others before.
    for size in sizes:
        (question,) = prompts_of((size,), seed=size)
        ask_disaggregated(pair.prefill, pair.decode, question)
        check_from_prefix_cache(pair, question)
        (other,) = prompts_of((80,), seed=size + 1)
        for shared in (BLOCK, 4 * BLOCK, 6 * BLOCK):
            if shared < size:
                check_from_prefix_cache(pair, replace(question, prompt=question.prompt[:shared] + other.prompt))
        check_from_prefix_cache(pair, replace(question, prompt=question.prompt + other.prompt))
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [spec_of("gemma3")], ids=str)
def test_later_prompts_find_only_what_was_written(pair: Pair, spec):
    check_others(pair, (200, 500))


@pytest.mark.full
@pytest.mark.parametrize("spec", WINDOWS + OTHERS, ids=str)
def test_later_prompts_find_only_what_was_written_whatever_the_cache(pair: Pair, spec):
    check_others(pair)


@pytest.mark.full
@pytest.mark.parametrize("spec", [spec_of("gemma3"), *WINDOWS], ids=str)
def test_all_answers_to_one_prompt_are_right(pair: Pair, spec):
    """Those behind the first find the prompt in the prefix cache, or compute it."""
    for size in (300, 500):
        (question,) = prompts_of((size,), seed=size)
        params = prefill(pair.prefill, question).params
        sampled = {"n": 3, "temperature": 0.7, "seed": 5}
        body = question.body(question.num_tokens, params) | sampled
        answers = [choice["token_ids"] for choice in post_body(pair.decode, question, body)["choices"]]
        body = alone(question).body(question.num_tokens, None) | sampled
        expected = [choice["token_ids"] for choice in post_body(pair.prefill, question, body)["choices"]]
        assert answers == expected, size
    wait_until_free(pair.servers, FREE_S)
