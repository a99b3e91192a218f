"""A prefill and a decode server of SGLang give the answers of the whole model, at any page size and parallelism."""

from __future__ import annotations

import re

import pytest
from asking import alone, ask, ask_all, first_logprobs, prompts_of
from sglang_servers import PairSpec, SideSpec

CHUNKED = ("--chunked-prefill-size", "512")
SPECS = [
    PairSpec("llama", SideSpec(16, flags=CHUNKED), SideSpec(16)),
    PairSpec("qwen3", SideSpec(1), SideSpec(64, flags=("--disaggregation-decode-enable-radix-cache",))),
    PairSpec("llama", SideSpec(64, tp=2), SideSpec(16)),
    PairSpec("qwen3", SideSpec(16), SideSpec(16, tp=2)),
    PairSpec("llama", SideSpec(16, tp=2), SideSpec(16, tp=2)),
    PairSpec("mellum", SideSpec(16, flags=CHUNKED), SideSpec(64)),
    PairSpec("llama", SideSpec(16, pp=2), SideSpec(16)),
    PairSpec("llama", SideSpec(16, dp=2), SideSpec(64, dp=2)),
    PairSpec("qwen3", SideSpec(16, tp=2, attn_dp=2), SideSpec(16)),
]
every_pair = pytest.mark.parametrize("spec", SPECS, ids=str)


@every_pair
def test_prompts_of_every_length_have_the_whole_models_answer(pair, spec):
    for prompt in prompts_of((1, 15, 16, 17, 64, 65, 300, 2500), seed=1):
        _, decode = ask(pair, prompt)
        assert (len(prompt), decode.tokens, decode.error) == (len(prompt), alone(spec.model, prompt), "")


@every_pair
def test_a_prefix_that_either_side_has_already_changes_nothing(pair, spec):
    (beginning, *ends) = prompts_of((200, 10, 30, 90), seed=2)
    for end in ends:
        _, decode = ask(pair, beginning + end)
        assert decode.tokens == alone(spec.model, beginning + end), decode.error


@every_pair
def test_several_at_once(pair, spec):
    prompts = prompts_of([60 + 40 * number for number in range(8)], seed=3)
    assert [answer.tokens for answer in ask_all(pair, prompts)] == [alone(spec.model, prompt) for prompt in prompts]


@every_pair
def test_the_cache_of_another_prompt_is_refused(pair, spec):
    ours, theirs = prompts_of((50, 50), seed=4)
    prefill, decode = ask(pair, ours, for_prefill=theirs)
    # Where another rank is refused first, the one that answers knows no more than that.
    assert re.search("this is the cache of another prompt|another rank has failed to fetch", decode.error)
    assert "was not read" in prefill.error
    assert ask(pair, ours)[1].tokens == alone(spec.model, ours)


@pytest.mark.parametrize("spec", SPECS[:1], ids=str)
def test_logprobs_of_the_first_token_come_with_it(pair, spec):
    (prompt,) = prompts_of((40,), seed=5)
    _, decode = ask(pair, prompt, return_logprob=True, top_logprobs_num=3)
    expected = first_logprobs(spec.model, prompt)
    logprob, token_id, _ = decode.meta["output_token_logprobs"][0]
    assert (token_id, logprob) == (int(expected.argmax()), pytest.approx(float(expected.max()), abs=1e-4))
    best = expected.topk(3)
    found = decode.meta["output_top_logprobs"][0]
    assert [(token_id, logprob) for logprob, token_id, _ in found] == [
        (int(token_id), pytest.approx(float(logprob), abs=1e-4))
        for logprob, token_id in zip(best.values, best.indices, strict=True)
    ]
