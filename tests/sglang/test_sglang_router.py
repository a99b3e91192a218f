"""kvferry's router in front of real SGLang servers: the whole model's answers, and an error where there can be none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import alone, first_logprobs, prompts_of
from routed import completion, post, routing, stream, tokens_of, told
from sglang_servers import PairSpec, SideSpec

from kvferry import WIRE_VERSION

SPECS = [PairSpec("llama")]
one_pair = pytest.mark.parametrize("spec", SPECS, ids=str)
# Rooms lead to either of the two engines of the prefill server.
with_several_engines = pytest.mark.parametrize("spec", [*SPECS, PairSpec("llama", SideSpec(dp=2))], ids=str)
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What does the ferry carry across the river at night?"}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def router(pair, tmp_path):
    with routing(*pair.servers, tmp_path / "router.log") as router:
        yield router


def expect_answer(router, model, prompt):
    """Two servers serve it, and its answer is the whole model's; the headers of that."""
    status, headers, answer = post(router, completion(prompt))
    assert status == 200, answer
    assert headers["x-kvferry-path"] == "disaggregated"
    assert tokens_of(answer) == alone(model, prompt)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return headers


def expect_stream(router, model, prompt):
    """The same of a stream."""
    events = stream(router, completion(prompt, stream_options={"include_usage": True}))
    assert [token for event in events for token in tokens_of(event)] == alone(model, prompt)
    assert events[-1]["usage"]["prompt_tokens"] == len(prompt)


def expect_first_logprobs(router, model, prompt):
    status, _, answer = post(router, completion(prompt, logprobs=1))
    assert status == 200, answer
    expected = float(first_logprobs(model, prompt).max())
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(expected, abs=1e-4)


def expect_several_at_once(router, model, seed):
    prompts = prompts_of([30 + 50 * number for number in range(8)], seed)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: post(router, completion(prompt)), prompts))
    assert [tokens_of(answer) for _, _, answer in answers] == [alone(model, prompt) for prompt in prompts]
    router.until_idle()


def expect_free_without_client(router, model, prompt, leaves_after_s):
    """Its client leaves in the middle of a long answer: that frees all, and the same prompt is served again."""
    with pytest.raises(TimeoutError):
        post(router, completion(prompt, max_tokens=6000), within_s=leaves_after_s)
    router.until_idle()
    assert tokens_of(post(router, completion(prompt))[2]) == alone(model, prompt)


def expect_none_served_without(prefill, router, model, seed):
    """The prefill server is killed amid a request: that one and the next one fail, until its next start."""
    amid, prompt = prompts_of((7000, 60), seed)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, router, completion(amid))
        prefill.kill()
    for status, _, answer in (waiting.result(), post(router, completion(prompt))):
        assert (status, answer["error"]["code"]) in ((502, "prefill_failed"), (503, "prefill_unavailable"))
    prefill.start()
    prefill.wait_until_ready()
    router.wait_until_ready()
    assert tokens_of(post(router, completion(prompt))[2]) == alone(model, prompt)
    router.until_idle()


@with_several_engines
def test_a_server_says_where_its_backend_listens(pair, spec):
    prefill, decode = (told(f"{server.url}/server_info")["kvferry"] for server in pair.servers)
    assert prefill == {"host": "127.0.0.1", "wire_version": str(WIRE_VERSION), "cache": decode["cache"]}
    assert decode["cache"]


@with_several_engines
def test_answers_are_the_whole_models(router, spec):
    for prompt in prompts_of((1, 16, 17, 300, 1500), seed=21):
        expect_answer(router, spec.model, prompt)


@one_pair
def test_streams_are_the_whole_models(router, spec):
    for prompt in prompts_of((40, 500), seed=22):
        expect_stream(router, spec.model, prompt)


@one_pair
def test_a_chat_reads_the_same_as_a_stream_and_whole(router, spec):
    path = "/v1/chat/completions"
    status, _, answer = post(router, CHAT, path)
    events = stream(router, CHAT, path)
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    assert text


@one_pair
def test_a_message_and_a_response_read_like_a_chat(router, spec):
    """Anthropic's and OpenAI's newer API, whose streams are made of named events."""
    asked = {name: CHAT[name] for name in ("model", "messages", "temperature")}
    _, _, chat = post(router, asked | {"max_tokens": 12}, "/v1/chat/completions")
    expected = chat["choices"][0]["message"]["content"]
    said = asked | {"max_tokens": 12}
    # Only this API looks at the model's name; and SGLang keeps two of its tokens back.
    model = told(f"{router.url}/v1/models")["data"][0]["id"]
    answered = {"model": model, "input": CHAT["messages"], "temperature": 0, "max_output_tokens": 14}
    status, headers, message = post(router, said, "/v1/messages")
    assert (status, headers["x-kvferry-path"]) == (200, "disaggregated"), message
    assert message["content"][0]["text"] == expected != ""
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    status, headers, response = post(router, answered, "/v1/responses")
    assert (status, headers["x-kvferry-path"]) == (200, "disaggregated"), response
    texts = [part["text"] for item in response["output"] for part in item.get("content") or []]
    assert "".join(texts) == expected
    events = stream(router, said, "/v1/messages", ends=b"message_stop")
    streamed = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(streamed) == expected
    events = stream(router, answered, "/v1/responses", ends=b"response.incomplete")
    assert "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta") == expected
    _, _, counted = post(router, {name: asked[name] for name in ("model", "messages")}, "/v1/messages/count_tokens")
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]
    router.until_idle()


@one_pair
def test_the_first_token_has_its_logprobs(router, spec):
    (prompt,) = prompts_of((40,), seed=23)
    expect_first_logprobs(router, spec.model, prompt)


@one_pair
def test_several_at_once(router, spec):
    expect_several_at_once(router, spec.model, seed=24)


@one_pair
def test_a_client_that_leaves_ends_both_requests(router, pair, spec):
    (prompt,) = prompts_of((60,), seed=25)
    expect_free_without_client(router, spec.model, prompt, leaves_after_s=2.0)


@one_pair
def test_what_two_servers_cannot_serve_together_is_refused(router, spec):
    (prompt,) = prompts_of((20,), seed=26)
    status, _, answer = post(router, completion(prompt, n=2))
    assert (status, answer["error"]["code"], answer["error"]["reason"]) == (
        400,
        "cannot_be_divided",
        "several_sequences",
    )
    status, _, answer = post(router, completion(prompt, bootstrap_room=7))
    assert (status, answer["error"]["param"]) == (400, "bootstrap_room")


@one_pair
def test_a_prompt_that_is_too_long_is_the_engines_word(router, spec):
    (prompt,) = prompts_of((17000,), seed=27)
    status, _, answer = post(router, completion(prompt))
    assert status == 400
    assert "17000" in str(answer)


@one_pair
def test_a_prefill_that_is_killed_fails_its_requests_and_its_next_start_serves(router, pair, spec):
    expect_none_served_without(pair.prefill, router, spec.model, seed=28)
