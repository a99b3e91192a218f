"""Two vLLM servers behind a stand-in for llm-d's routing sidecar: what its clients see, and that the cache moved.

The stand-in, `llm_d`, says which files and commit it follows.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from answers import alone, loaded_tokens, prompts_of, wait_until_free
from llm_d.proxy import PREFILL_HEADER
from llm_d.running import RunningSidecar
from llm_d.scheduler import SCHEDULED_BY
from proxy import ANSWER_S, Question, ask, post_body
from servers import PLAIN, Pair

FREE_S = 60.0
MESSAGES = [{"role": "user", "content": "What does the ferry carry across the river at night?"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RECOMPUTE = replace(PLAIN, failure_policy="recompute")
# The two prompts race: the cache is being read, or has been and is freed, or the wrong one of them is first.
REASONS = ("wrong_prompt", "already_claimed", "expired")
NOBODY = {PREFILL_HEADER: "127.0.0.1:1"}
one_pair = pytest.mark.parametrize("spec", [PLAIN], ids=str)


@pytest.fixture
def sidecar(pair, tmp_path):
    with RunningSidecar(pair, tmp_path / "sidecar.log", "nixlv2").running() as sidecar:
        yield sidecar


def opened(
    sidecar: RunningSidecar, body: dict[str, Any], path: str = COMPLETIONS, headers: Mapping[str, str] | None = None
) -> http.client.HTTPConnection:
    """A request that nobody has read the answer of; with the prefill server's name unless there are other headers."""
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=ANSWER_S)
    more = sidecar.headers if headers is None else headers
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **more})
    return connection


def sent(sidecar: RunningSidecar, *request: Any) -> tuple[int, Mapping[str, str], bytes]:
    with closing(opened(sidecar, *request)) as connection:
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def body_of(question: Question, **more: Any) -> dict[str, Any]:
    """What a client asks: it knows nothing of another server."""
    return {**question.body(question.num_tokens, None), **more}


def answer_of(sidecar: RunningSidecar, question: Question, **more: Any) -> dict[str, Any]:
    status, headers, text = sent(sidecar, body_of(question, **more))
    assert status == 200, text
    # Of its own accord the sidecar gives each request an id, by which our middleware knows it.
    assert headers["x-kvferry-cache"] == "received"
    answer: dict[str, Any] = json.loads(text)
    return answer


def tokens_of(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(token for choice in answer["choices"] for token in choice.get("token_ids") or ())


def check_right(sidecar: RunningSidecar, pair: Pair, question: Question) -> None:
    assert tokens_of(answer_of(sidecar, question)) == ask(pair.decode, alone(question)).tokens


@one_pair
def test_answers_are_the_whole_servers_and_the_prompt_is_not_computed_again(sidecar, pair, spec):
    for question in prompts_of((2, 128, 300, 2000), seed=61):
        before = loaded_tokens(pair.decode)
        check_right(sidecar, pair, question)
        assert loaded_tokens(pair.decode) - before == len(question.prompt) - 1
    wait_until_free(pair.servers, FREE_S)


@one_pair
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_the_whole_servers_and_ends_in_order(sidecar, pair, spec, path):
    (question,) = prompts_of((300,), seed=62)
    content = {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": list(question.prompt)}
    asked = {key: value for key, value in body_of(question).items() if key not in ("prompt", "logprobs")} | content
    with closing(opened(pair.decode, asked, path, {})) as connection:
        whole = json.loads(connection.getresponse().read())
    asked = asked | {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": alone(question).salt}
    status, headers, text = sent(sidecar, asked, path)
    *events, done = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line]
    assert (status, headers["x-kvferry-cache"], done) == (200, "received", b"[DONE]")
    documents = list(map(json.loads, events))
    assert tuple(token for one in documents for token in tokens_of(one)) == tokens_of(whole)
    assert documents[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@one_pair
def test_several_at_once(sidecar, pair, spec):
    questions = prompts_of([30 + 50 * number for number in range(8)], seed=63)
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: tokens_of(answer_of(sidecar, question)), questions))
    assert answers == [ask(pair.decode, alone(question)).tokens for question in questions]
    wait_until_free(pair.servers, FREE_S)


@one_pair
def test_several_answers_to_one_prompt(sidecar, pair, spec):
    """The prefill request asks for several answers, too, and only one of its references is read."""
    (question,) = prompts_of((700,), seed=64)
    more = {"n": 3, "temperature": 0.7, "seed": 5}
    before = loaded_tokens(pair.decode)
    answer = answer_of(sidecar, question, **more)
    assert loaded_tokens(pair.decode) - before == 699
    assert tokens_of(answer) == tokens_of(post_body(pair.prefill, question, body_of(alone(question), **more)))
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN, pytest.param(RECOMPUTE, marks=pytest.mark.full)], ids=str)
def test_several_prompts_are_refused_or_computed_as_the_policy_says(sidecar, pair, spec):
    """The prefill server answers with the reference to one of them, and the sidecar names it for all."""
    questions = prompts_of((300, 400), seed=73)
    body = body_of(questions[0], prompt=[list(question.prompt) for question in questions])
    status, _, text = sent(sidecar, body)
    if spec.failure_policy == "fail":
        assert (status, json.loads(text)["error"]["code"] in REASONS) == (502, True), text
    else:
        expected = [token for question in questions for token in ask(pair.decode, alone(question)).tokens]
        assert (status, list(tokens_of(json.loads(text)))) == (200, expected)
    wait_until_free(pair.servers, FREE_S)


@one_pair
def test_a_client_may_have_an_id_of_its_own(sidecar, pair, spec):
    """The sidecar adds another one; vLLM and our middleware have to take the same of the two."""
    (question,) = prompts_of((300,), seed=72)
    before = loaded_tokens(pair.decode)
    headers = {**sidecar.headers, "X-Request-Id": "mine"}
    status, told, text = sent(sidecar, body_of(question), COMPLETIONS, headers)
    assert (status, told["x-kvferry-cache"]) == (200, "received"), text
    assert json.loads(text)["id"] == "cmpl-mine"
    assert loaded_tokens(pair.decode) - before == 299


@one_pair
def test_the_scheduler_reads_its_metrics_through_the_sidecar(sidecar, pair, spec):
    with closing(http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=ANSWER_S)) as connection:
        connection.request("GET", "/metrics")
        written = connection.getresponse().read().decode()
    assert [name for name in SCHEDULED_BY if not re.search(rf"^{name}{{", written, re.MULTILINE)] == []


@one_pair
def test_the_usage_says_what_the_prefill_server_had_cached(sidecar, pair, spec):
    (question,) = prompts_of((700,), seed=65)
    ask(pair.prefill, question)
    usage = answer_of(sidecar, question)["usage"]
    assert usage["prompt_tokens"] == 700
    # Without `--enable-prompt-tokens-details` vLLM does not say, and the sidecar takes that for none.
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@one_pair
def test_a_request_that_names_no_prefill_server_is_computed_by_the_decode_server(sidecar, pair, spec):
    (question,) = prompts_of((300,), seed=66)
    before = loaded_tokens(pair.decode)
    status, _, text = sent(sidecar, body_of(question), COMPLETIONS, {})
    assert (status, tokens_of(json.loads(text))) == (200, ask(pair.decode, alone(question)).tokens)
    assert loaded_tokens(pair.decode) == before


@one_pair
@pytest.mark.parametrize("num_tokens", [1, 2000], ids=["decoding", "prefilling"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_both(sidecar, pair, spec, num_tokens, stream):
    """The sidecar ends whichever request is under way."""
    for after_s in (0.0, 0.03, 0.3):
        (question,) = prompts_of((num_tokens + 60,), num_tokens=1000, seed=67)
        connection = opened(sidecar, body_of(question, stream=stream))
        threading.Event().wait(after_s)
        connection.close()
    wait_until_free(pair.servers, FREE_S)
    check_right(sidecar, pair, prompts_of((300,), seed=68)[0])


@one_pair
def test_what_the_prefill_server_refuses_is_the_answer(sidecar, pair, spec):
    (question,) = prompts_of((9000,), seed=69)
    status, _, text = sent(sidecar, body_of(question))
    assert (status, json.loads(text)["error"]["code"]) == (400, 400)


@one_pair
def test_a_prefill_server_that_cannot_be_reached_is_502_and_nothing_is_computed(sidecar, pair, spec):
    """llm-d's scheduler has to know that it is gone; a client's retry gets another one."""
    (question,) = prompts_of((300,), seed=70)
    before = pair.decode.metric("vllm:prompt_tokens_total")
    assert sent(sidecar, body_of(question), COMPLETIONS, NOBODY)[::2] == (502, b"")
    assert pair.decode.metric("vllm:prompt_tokens_total") == before
    check_right(sidecar, pair, question)


@pytest.mark.full
@one_pair
def test_a_prefill_server_that_is_started_again_is_found_again(sidecar, pair, spec):
    (question,) = prompts_of((300,), seed=71)
    check_right(sidecar, pair, question)
    pair.prefill.kill()
    assert sent(sidecar, body_of(question))[0] == 502
    pair.prefill.start()
    pair.prefill.wait_until_ready()
    check_right(sidecar, pair, alone(question))
