"""Two vLLM servers behind what others put in front of them: what its clients see, and that the cache moved."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from answers import alone, loaded_tokens, prompts_of, wait_until_free
from fronts import (
    CHAT,
    COMPLETIONS,
    FREE_S,
    FRONTS,
    OwnRouter,
    answer_of,
    body_of,
    check_right,
    opened,
    sent,
    tokens_of,
)
from proxy import ask, post_body
from servers import PLAIN

MESSAGES = [{"role": "user", "content": "What does the ferry carry across the river at night?"}]
OTHER_APIS = (
    ("/v1/responses", {"input": "What does the ferry carry in the morning?", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
)
RECOMPUTE = replace(PLAIN, failure_policy="recompute")
# The two prompts race: the cache is being read, or has been and is freed, or the wrong one of them is first.
REASONS = ("wrong_prompt", "already_claimed", "expired")
one_pair = pytest.mark.parametrize("spec", [PLAIN], ids=str)


@pytest.fixture(params=FRONTS)
def front(request, pair, tmp_path):
    """What a test's requests go through: everything in turn."""
    if request.param == "vllm-router" and not OwnRouter.PROGRAM.exists():
        pytest.skip("vllm-router is not installed: see make test-vllm")
    with FRONTS[request.param](pair, tmp_path / "front.log").running() as front:
        yield front


@one_pair
def test_answers_are_the_whole_servers_and_the_prompt_is_not_computed_again(front, pair, spec):
    for question in prompts_of((2, 128, 300, 2000), seed=61):
        before = loaded_tokens(pair.decode)
        check_right(front, pair, question)
        assert loaded_tokens(pair.decode) - before == len(question.prompt) - 1
    wait_until_free(pair.servers, FREE_S)


@one_pair
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_the_whole_servers_and_ends_in_order(front, pair, spec, path):
    (question,) = prompts_of((300,), seed=62)
    content = {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": list(question.prompt)}
    asked = {key: value for key, value in body_of(question).items() if key not in ("prompt", "logprobs")} | content
    with closing(opened(pair.decode, asked, path, {})) as connection:
        whole = json.loads(connection.getresponse().read())
    asked = asked | {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": alone(question).salt}
    status, headers, text = sent(front, asked, path)
    *events, done = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line]
    assert (status, headers["x-kvferry-cache"], done) == (200, "received", b"[DONE]")
    documents = list(map(json.loads, events))
    assert tuple(token for one in documents for token in tokens_of(one)) == tokens_of(whole)
    assert documents[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@one_pair
@pytest.mark.parametrize("front", ["vllm-router"], indirect=True)
@pytest.mark.parametrize(("path", "asked"), OTHER_APIS, ids=[path for path, _ in OTHER_APIS])
def test_the_cache_moves_for_other_apis(front, pair, spec, path, asked):
    before = loaded_tokens(pair.decode)
    status, headers, text = sent(front, {"model": "tiny", **asked}, path)
    assert (status, headers["x-kvferry-cache"]) == (200, "received"), text
    assert loaded_tokens(pair.decode) > before
    wait_until_free(pair.servers, FREE_S)


@one_pair
def test_several_at_once(front, pair, spec):
    questions = prompts_of([30 + 50 * number for number in range(8)], seed=63)
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: tokens_of(answer_of(front, question)), questions))
    assert answers == [ask(pair.decode, alone(question)).tokens for question in questions]
    wait_until_free(pair.servers, FREE_S)


@one_pair
def test_several_answers_to_one_prompt(front, pair, spec):
    """The prefill request asks for several answers, too, and only one of its references is read."""
    (question,) = prompts_of((700,), seed=64)
    more = {"n": 3, "temperature": 0.7, "seed": 5}
    before = loaded_tokens(pair.decode)
    answer = answer_of(front, question, **more)
    assert loaded_tokens(pair.decode) - before == 699
    assert tokens_of(answer) == tokens_of(post_body(pair.prefill, question, body_of(alone(question), **more)))
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN, pytest.param(RECOMPUTE, marks=pytest.mark.full)], ids=str)
def test_several_prompts_are_refused_or_computed_as_the_policy_says(front, pair, spec):
    """The prefill server answers with the reference to one of them, and the front names it for all."""
    questions = prompts_of((300, 400), seed=73)
    body = body_of(questions[0], prompt=[list(question.prompt) for question in questions])
    status, _, text = sent(front, body)
    if spec.failure_policy == "fail":
        assert (status, json.loads(text)["error"]["code"] in REASONS) == (502, True), text
    else:
        expected = [token for question in questions for token in ask(pair.decode, alone(question)).tokens]
        assert (status, list(tokens_of(json.loads(text)))) == (200, expected)
    wait_until_free(pair.servers, FREE_S)


@one_pair
@pytest.mark.parametrize("num_tokens", [1, 2000], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_both(front, pair, spec, num_tokens, stream):
    """The front ends whichever request is under way."""
    for after_s in (0.0, 0.03, 0.3):
        (question,) = prompts_of((num_tokens + 60,), num_tokens=1000, seed=67)
        connection = opened(front, body_of(question, stream=stream))
        threading.Event().wait(after_s)
        connection.close()
    wait_until_free(pair.servers, FREE_S)
    check_right(front, pair, prompts_of((300,), seed=68)[0])


@one_pair
def test_what_the_prefill_server_refuses_is_the_answer(front, pair, spec):
    (question,) = prompts_of((9000,), seed=69)
    status, _, text = sent(front, body_of(question))
    assert (status, json.loads(text)["error"]["code"]) == (400, 400)
