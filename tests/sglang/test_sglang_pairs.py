"""One side is SGLang and the other another engine: the answers are the whole model's, in both directions."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import alone, from_other, prompts_of, to_other
from other_engines import OtherSpec
from sglang_servers import PairSpec, SideSpec

CHUNKED = ("--chunked-prefill-size", "512")
DECODE_CACHES = ("--disaggregation-decode-enable-radix-cache",)
LLAMA = PairSpec("llama", SideSpec(16, flags=CHUNKED), SideSpec(16))
QWEN3 = PairSpec("qwen3", SideSpec(64), SideSpec(64, flags=DECODE_CACHES))
# Its windows have pages of their own in SGLang, and are a limit of what is read in transformers.
MELLUM = PairSpec("mellum", SideSpec(16), SideSpec(64))
# In float32, vLLM's attention on CPUs has blocks of multiples of 32 tokens.
CASES = [
    (LLAMA, OtherSpec("transformers", "llama", 64)),
    (LLAMA, OtherSpec("vllm", "llama", 64)),
    (QWEN3, OtherSpec("transformers", "qwen3", 16)),
    (QWEN3, OtherSpec("vllm", "qwen3", 32)),
    (MELLUM, OtherSpec("transformers", "mellum", 16)),
]

every_case = pytest.mark.parametrize(("spec", "other_spec"), CASES, ids=str)
# One token, one page, one more, at either side's page size, and long ones that are computed in chunks.
SIZES = (1, 15, 16, 17, 64, 65, 300, 2500)


@pytest.fixture(params=["from SGLang", "to SGLang"])
def ask(request, other, pair):
    """Sends a prompt to a prefill and a decode engine; what the decode engine says."""
    if request.param == "to SGLang":
        return lambda *prompts: from_other(other, pair.decode, *prompts)
    return lambda *prompts: to_other(pair.prefill, other, *prompts)


@every_case
def test_prompts_of_every_length_have_the_whole_models_answer(ask, spec):
    for prompt in prompts_of(SIZES, seed=11):
        answer = ask(prompt)
        assert (len(prompt), answer.tokens, answer.error) == (len(prompt), alone(spec.model, prompt), "")


@every_case
def test_a_prefix_that_either_side_has_already_changes_nothing(ask, spec):
    (beginning, *ends) = prompts_of((200, 10, 30, 90), seed=12)
    for end in ends:
        answer = ask(beginning + end)
        assert answer.tokens == alone(spec.model, beginning + end), answer.error


@every_case
def test_several_at_once(ask, spec):
    prompts = prompts_of([60 + 40 * number for number in range(8)], seed=13)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert [answer.tokens for answer in answers] == [alone(spec.model, prompt) for prompt in prompts]


@every_case
def test_the_cache_of_another_prompt_is_refused(ask, spec):
    ours, theirs = prompts_of((50, 50), seed=14)
    assert re.search("wrong_prompt|the cache of another prompt", ask(ours, theirs).error)
    assert ask(ours).tokens == alone(spec.model, ours)
