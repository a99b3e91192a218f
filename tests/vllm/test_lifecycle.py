"""What happens around a transfer on real vLLM servers: cached prefixes, clients that leave, full memory, lost peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from answers import alone, check_equal, judge, loaded_tokens, prompts_of, wait_until_free
from proxy import REMOTE_DECODE, Question, RefusedError, ask, ask_disaggregated, decode, open_request, prefill
from servers import PLAIN, Pair, Server, ServerSpec

SIZES = (5, 128, 300, 700)
FREE_S = 90.0
TOLD_S = 10.0
BLOCK_TOKENS = 128
RECOMPUTE = replace(PLAIN, failure_policy="recompute")
# 24 blocks of 1 MiB: eight requests of five blocks do not fit.
SMALL = ServerSpec("kv_consumer", flags=("--max-model-len", "2048"), cache_bytes=24 << 20)
CROWDED = replace(PLAIN, decode=SMALL)
LEAVE_AFTER_S = (0.0, 0.01, 0.03, 0.1, 0.3)
Params = dict[str, Any]


def right(pair: Pair, question: Question, answer: Any) -> bool:
    return not judge(pair.prefill, pair.decode, question, answer).problem


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("cached", [0, 100, 300, 700])
def test_only_what_the_decode_side_lacks_is_loaded(pair, spec, cached):
    question = prompts_of((700,), seed=cached)[0]
    if cached:
        ask(pair.decode, replace(question, prompt=question.prompt[:cached], num_tokens=1))
    before = loaded_tokens(pair.decode)
    answer = ask_disaggregated(pair.prefill, pair.decode, question)
    lacking = 700 - cached // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaded_tokens(pair.decode) - before in (lacking - 1, lacking)
    assert right(pair, question, answer)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_cached_whole_prompt_loads_little(pair, spec):
    question = prompts_of((5 * BLOCK_TOKENS,))[0]
    ask(pair.decode, question)
    before = loaded_tokens(pair.decode)
    answer = ask_disaggregated(pair.prefill, pair.decode, question)
    assert loaded_tokens(pair.decode) - before <= BLOCK_TOKENS
    assert right(pair, question, answer)
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_blocks_that_requests_share_on_the_prefill_side_are_sent_to_each(pair, spec):
    question = prompts_of((700,))[0]
    params = [prefill(pair.prefill, question).params for _ in range(3)]
    before = loaded_tokens(pair.decode)
    answers = []
    for one in params:
        pair.decode.forget_prefixes(FREE_S)
        answers.append(decode(pair.decode, question, one))
    assert loaded_tokens(pair.decode) - before >= 3 * 699
    assert all(right(pair, question, answer) for answer in answers)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_clients_leave_at_any_moment_of_the_decode_request(pair, spec):
    for i, after_s in enumerate(LEAVE_AFTER_S):
        question = replace(prompts_of((700,), num_tokens=200, seed=i)[0], request_id=f"leaves-{i}")
        params = prefill(pair.prefill, question).params
        leave(pair.decode, question, question.body(200, params), after_s)
    check_equal(pair, prompts_of(SIZES))
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_clients_leave_during_prefill_or_never_decode(pair, spec):
    for i, after_s in enumerate(LEAVE_AFTER_S):
        question = prompts_of((2000,), seed=i)[0]
        leave(pair.prefill, question, question.body(1, REMOTE_DECODE), after_s)
    prefill(pair.prefill, prompts_of((700,))[0])
    check_equal(pair, prompts_of(SIZES))
    wait_until_free(pair.servers, FREE_S)


def leave(server: Server, question: Question, body: dict[str, Any], after_s: float) -> None:
    """Close the connection a while after the request: the moments are spread over the request's life."""
    connection = open_request(server, question, body)
    threading.Event().wait(after_s)
    connection.close()


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_lists_of_blocks_may_be_flat(pair, spec):
    question = prompts_of((300,))[0]
    params = dict(prefill(pair.prefill, question).params or {})
    blocks = params.get("remote_block_ids")
    if blocks and isinstance(blocks[0], list):
        params["remote_block_ids"] = blocks[0]
    before = loaded_tokens(pair.decode)
    assert right(pair, question, decode(pair.decode, question, params))
    assert loaded_tokens(pair.decode) - before >= 299


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("request_id", ["a,b:c|d e", "long-" * 80, "n\xe9e"], ids=["punctuation", "long", "not ASCII"])
def test_clients_choose_any_request_id(pair, spec, request_id):
    question = replace(prompts_of((300,))[0], request_id=request_id)
    before = loaded_tokens(pair.decode)
    assert right(pair, question, ask_disaggregated(pair.prefill, pair.decode, question))
    assert loaded_tokens(pair.decode) - before >= 299
    wait_until_free(pair.servers, TOLD_S)


MALFORMED: dict[str, Callable[[Params], Params]] = {
    "no params": lambda params: {"do_remote_prefill": True},
    "no engine": lambda params: without(params, "remote_engine_id"),
    "no host": lambda params: without(params, "remote_host"),
    "no port": lambda params: without(params, "remote_port"),
    "no request": lambda params: without(params, "remote_request_id"),
    "port is text": lambda params: {**params, "remote_port": "seven"},
    "port is nobody's": lambda params: {**params, "remote_port": 1},
    "port is out of range": lambda params: {**params, "remote_port": 70_000},
    "host is a number": lambda params: {**params, "remote_host": 7},
    "host is unknown": lambda params: {**params, "remote_host": "nobody.invalid"},
    "engine is unknown": lambda params: {**params, "remote_engine_id": "somebody-else"},
    "engine is a list": lambda params: {**params, "remote_engine_id": [1, 2]},
    "request is unknown": lambda params: {**params, "remote_request_id": "cmpl-never-seen-0"},
    "request is another type": lambda params: {**params, "remote_request_id": {"a": 1}},
    "our own marks": lambda params: {**params, "_kvferry_fetched": True, "_kvferry_truncated": True},
    "tokens are fewer": lambda params: {**params, "remote_num_tokens": 130},
    "tokens are many": lambda params: {**params, "remote_num_tokens": 10**15},
    "tokens are none": lambda params: {**params, "remote_num_tokens": 0},
    "blocks are text": lambda params: {**params, "remote_block_ids": "abc"},
    "blocks are negative": lambda params: {**params, "remote_block_ids": [[-1, -2, -3]]},
    "blocks are out of range": lambda params: {**params, "remote_block_ids": [[10**9] * 3]},
    "blocks are somebody else's": lambda params: {**params, "remote_block_ids": [[0, 1, 2]]},
    "blocks are too few": lambda params: {**params, "remote_block_ids": [[1]]},
    "blocks are too many": lambda params: {**params, "remote_block_ids": [list(range(5000))]},
    "ranks are many": lambda params: {**params, "tp_size": 10**6},
    "ranks are text": lambda params: {**params, "tp_size": "two"},
}


def without(params: Params, key: str) -> Params:
    return {name: value for name, value in params.items() if name != key}


@pytest.mark.parametrize("spec", [PLAIN, pytest.param(RECOMPUTE, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_params_are_refused_or_harmless(pair, spec, name):
    """They come back from a client that nobody trusts: an error or a right answer, never a wrong one, never an end."""
    question = prompts_of((300,))[0]
    params = prefill(pair.prefill, question).params
    try:
        answer = decode(pair.decode, question, MALFORMED[name](params or {}))
    except RefusedError as refused:
        print(f"\n{name}: {refused}")
    else:
        assert right(pair, question, answer)
    assert all(server.healthy() for server in pair.servers)
    check_equal(pair, prompts_of((130,)))


@pytest.mark.full
@pytest.mark.parametrize("spec", [CROWDED], ids=str)
def test_requests_are_preempted_on_a_full_decode_side(pair, spec):
    check_equal(pair, prompts_of((384,) * 8, num_tokens=250), at_once=8)
    assert pair.decode.metric("vllm:num_preemptions_total") > 0
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.full
@pytest.mark.parametrize("known", [False, True], ids=["never met", "met before"])
@pytest.mark.parametrize("spec", [PLAIN, RECOMPUTE], ids=str)
def test_the_prefill_server_is_lost_before_the_transfer(running, spec, known):
    running.stop()
    pair = running.pair(spec)
    if known:
        check_equal(pair, prompts_of(SIZES))
    question = prompts_of((300,))[0]
    expected = ask(pair.decode, alone(question))
    params = prefill(pair.prefill, question).params
    pair.prefill.kill()
    check_by_policy(pair, question, params, expected)
    assert ask(pair.decode, alone(question)).tokens == expected.tokens
    # The old reference names an engine that is gone; the new one must not be taken for it.
    restart(pair.prefill)
    check_by_policy(pair, question, params, expected)
    check_equal(pair, prompts_of(SIZES))
    wait_until_free(pair.servers, FREE_S)


def check_by_policy(pair: Pair, question: Question, params: Params | None, expected: Any) -> None:
    """A cache that cannot be fetched is computed again or refused, as the servers were told."""
    question = replace(question, salt=alone(question).salt)
    if pair.spec.failure_policy == "recompute":
        assert decode(pair.decode, question, params).tokens == expected.tokens
    else:
        with pytest.raises(RefusedError):
            decode(pair.decode, question, params)


def restart(server: Server) -> None:
    server.kill()
    server.start()
    server.wait_until_ready()


@pytest.mark.full
@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_the_decode_server_is_restarted(pair, spec):
    check_equal(pair, prompts_of(SIZES))
    prefill(pair.prefill, prompts_of((700,))[0])
    restart(pair.decode)
    check_equal(pair, prompts_of(SIZES))
    wait_until_free(pair.servers, FREE_S)
