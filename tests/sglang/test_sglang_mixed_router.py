"""kvferry's router in front of SGLang on one side and another engine on the other: the whole model's answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import alone, prompts_of
from other_engines import OtherSpec
from routed import completion, post, routing, tokens_of, told
from sglang_servers import PairSpec, SideSpec
from test_sglang_router import (
    expect_answer,
    expect_first_logprobs,
    expect_free_without_client,
    expect_none_served_without,
    expect_several_at_once,
    expect_stream,
)
from tiny_models import VOCAB_SIZE

NAMED = ("--served-model-name", "tiny")
SPEC = PairSpec("llama", SideSpec(16, flags=NAMED), SideSpec(16, flags=NAMED))
ENGINES = [OtherSpec("transformers", "llama", 64), OtherSpec("vllm", "llama", 64)]

every_engine = pytest.mark.parametrize(("spec", "other_spec"), [(SPEC, one) for one in ENGINES], ids=str)
embedded = pytest.mark.parametrize(("spec", "other_spec"), [(SPEC, ENGINES[0])], ids=str)
from_sglang = pytest.mark.parametrize("direction", ["from SGLang"])
to_sglang = pytest.mark.parametrize("direction", ["to SGLang"])
both_ways = pytest.mark.parametrize("direction", ["from SGLang", "to SGLang"])


@pytest.fixture
def router(other, pair, direction, tmp_path):
    servers = (pair.prefill, other) if direction == "from SGLang" else (other, pair.decode)
    with routing(*servers, tmp_path / "router.log") as router:
        yield router


@every_engine
@both_ways
def test_the_router_finds_out_that_the_two_can_meet(router):
    members = told(f"{router.url}/kvferry/members")
    (cache,) = {one["cache"] for one in members["members"]}
    assert cache
    assert members["incompatible_pairs"] == []
    assert {(one["handover"], one["meets_in_rooms"]) for one in members["members"]} == {
        ("room", True),
        ("reference", True),
    }


@every_engine
@both_ways
def test_answers_are_the_whole_models(router, spec, direction):
    for prompt in prompts_of((1, 16, 17, 64, 65, 300, 1500), seed=41):
        headers = expect_answer(router, spec.model, prompt)
        if direction == "from SGLang" and len(prompt) > 1:
            assert headers["x-kvferry-cache"] == "received"
    router.until_idle()


@every_engine
@both_ways
def test_streams_are_the_whole_models(router, spec):
    for prompt in prompts_of((40, 500), seed=42):
        expect_stream(router, spec.model, prompt)


@every_engine
@both_ways
def test_what_a_client_asks_for_is_passed_to_whom_it_concerns(router, spec):
    """A prefill is asked for one token: neither the least number nor where the answer ends may be in its way."""
    (prompt,) = prompts_of((70,), seed=43)
    whole = alone(spec.model, prompt)
    never = next(token for token in range(10, VOCAB_SIZE) if token not in whole)
    status, _, answer = post(router, completion(prompt, min_tokens=6, stop_token_ids=[never], priority=0))
    assert (status, tokens_of(answer)) == (200, whole), answer


@embedded
@to_sglang
def test_the_first_token_has_its_logprobs(router, spec):
    (prompt,) = prompts_of((40,), seed=44)
    expect_first_logprobs(router, spec.model, prompt)


@every_engine
@both_ways
def test_several_at_once(router, spec):
    expect_several_at_once(router, spec.model, seed=45)


@every_engine
@both_ways
def test_a_client_that_leaves_frees_both(router, spec):
    (prompt,) = prompts_of((60,), seed=46)
    expect_free_without_client(router, spec.model, prompt, leaves_after_s=3.0)


@every_engine
@from_sglang
def test_a_decode_that_computes_answers_without_sglang(router, pair, spec):
    (long, prompt) = prompts_of((7000, 60), seed=47)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, router, completion(long, max_tokens=4))
        pair.prefill.kill()
        assert (waiting.result()[0], tokens_of(waiting.result()[2])) == (200, alone(spec.model, long, 4))
    status, headers, answer = post(router, completion(prompt))
    assert (status, headers["x-kvferry-path"]) == (200, "decode-only")
    assert tokens_of(answer) == alone(spec.model, prompt)
    pair.prefill.start()
    pair.prefill.wait_until_ready()


@embedded
@to_sglang
def test_without_its_prefill_sglang_answers_nobody_until_that_is_back(router, other, spec):
    """vLLM is a process of its own, which outlives the one that has started it where that is killed."""
    expect_none_served_without(other, router, spec.model, seed=48)
