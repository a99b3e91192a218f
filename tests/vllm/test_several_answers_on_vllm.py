"""Several answers to one prompt on real vLLM servers, behind a proxy that knows nothing of them: one fetch for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from answers import alone, loaded_tokens, prompts_of, wait_until_free
from proxy import Question, RefusedError, post_body, prefill
from servers import PLAIN, Pair, Server, ServerSpec

NUM_ANSWERS, SIZE = 3, 700
FREE_S = 60.0
UNCACHED = replace(PLAIN, decode=ServerSpec("kv_consumer", flags=("--no-enable-prefix-caching",)))
ONE_AT_A_TIME = replace(PLAIN, decode=ServerSpec("kv_consumer", flags=("--max-num-seqs", "1")))
DECLINED = "vllm:kvferry_declined_transfers_total"


def num_declined(server: Server) -> float:
    """A server that has declined none has no such metric."""
    try:
        return server.metric(DECLINED)
    except KeyError:
        return 0.0


def ask_for(server: Server, question: Question, params: dict[str, Any] | None, **more: Any) -> list[list[int]]:
    """The tokens of each answer."""
    body = question.body(question.num_tokens, params)
    body |= {"n": NUM_ANSWERS, "temperature": 0.7, "seed": 5, **more}
    return [choice["token_ids"] for choice in post_body(server, question, body)["choices"]]


def differ(answers: list[list[int]]) -> bool:
    return len(set(map(tuple, answers))) > 1


@pytest.mark.parametrize("spec", [PLAIN, ONE_AT_A_TIME], ids=["at once", "one after the other"])
def test_one_fetch_is_for_all(pair: Pair, spec):
    (question,) = prompts_of((SIZE,))
    params, before = prefill(pair.prefill, question).params, loaded_tokens(pair.decode)
    answers = ask_for(pair.decode, question, params)
    assert loaded_tokens(pair.decode) - before == SIZE - 1
    assert answers == ask_for(pair.prefill, alone(question), None)
    assert differ(answers)
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [UNCACHED], ids=["uncached"])
def test_without_a_prefix_cache_the_others_compute_the_prompt(pair: Pair, spec):
    (question,) = prompts_of((SIZE,))
    params, before = prefill(pair.prefill, question).params, loaded_tokens(pair.decode)
    declined = num_declined(pair.decode)
    assert ask_for(pair.decode, question, params) == ask_for(pair.prefill, alone(question), None)
    assert loaded_tokens(pair.decode) - before == SIZE - 1
    assert num_declined(pair.decode) - declined == NUM_ANSWERS - 1
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=["several prompts"])
def test_several_prompts_with_one_reference_are_refused_with_the_reason(pair: Pair, spec):
    ours, other = prompts_of((SIZE, SIZE))
    params = prefill(pair.prefill, ours).params
    # The two race: the cache is being read, or has been and is freed, or the wrong one of them is first.
    with pytest.raises(RefusedError, match=r"wrong_prompt|claimed|expired") as refused:
        ask_for(pair.decode, replace(ours, request_id="two-prompts"), params, prompt=[[*ours.prompt], [*other.prompt]])
    assert refused.value.status == 502
    wait_until_free(pair.servers, FREE_S)
