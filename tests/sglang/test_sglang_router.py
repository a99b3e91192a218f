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


@with_several_engines
def test_a_server_says_where_its_backend_listens(pair, spec):
    prefill, decode = (told(f"{server.url}/server_info")["kvferry"] for server in pair.servers)
    assert prefill == {"host": "127.0.0.1", "wire_version": str(WIRE_VERSION), "cache": decode["cache"]}
    assert decode["cache"]


@with_several_engines
def test_answers_are_the_whole_models(router, spec):
    for prompt in prompts_of((1, 16, 17, 300, 1500), seed=21):
        status, headers, answer = post(router, completion(prompt))
        assert status == 200, answer
        assert headers["x-kvferry-path"] == "disaggregated"
        assert tokens_of(answer) == alone(spec.model, prompt)
        assert answer["usage"]["prompt_tokens"] == len(prompt)


@one_pair
def test_streams_are_the_whole_models(router, spec):
    for prompt in prompts_of((40, 500), seed=22):
        events = stream(router, completion(prompt, stream_options={"include_usage": True}))
        assert [token for event in events for token in tokens_of(event)] == alone(spec.model, prompt)
        assert events[-1]["usage"]["prompt_tokens"] == len(prompt)


@one_pair
def test_a_chat_reads_the_same_as_a_stream_and_whole(router, spec):
    path = "/v1/chat/completions"
    status, _, answer = post(router, CHAT, path)
    events = stream(router, CHAT, path)
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    assert text


@one_pair
def test_the_first_token_has_its_logprobs(router, spec):
    (prompt,) = prompts_of((40,), seed=23)
    status, _, answer = post(router, completion(prompt, logprobs=1))
    assert status == 200, answer
    expected = float(first_logprobs(spec.model, prompt).max())
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(expected, abs=1e-4)


@one_pair
def test_several_at_once(router, spec):
    prompts = prompts_of([30 + 50 * number for number in range(8)], seed=24)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: post(router, completion(prompt)), prompts))
    assert [tokens_of(answer) for _, _, answer in answers] == [alone(spec.model, prompt) for prompt in prompts]
    router.until_idle()


@one_pair
def test_a_client_that_leaves_ends_both_requests(router, pair, spec):
    (prompt,) = prompts_of((60,), seed=25)
    with pytest.raises(TimeoutError):
        post(router, completion(prompt, max_tokens=6000), within_s=2)
    router.until_idle()
    assert tokens_of(post(router, completion(prompt))[2]) == alone(spec.model, prompt)


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
    (prompt, other) = prompts_of((7000, 60), seed=28)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, router, completion(prompt))
        pair.prefill.kill()
        status, _, answer = waiting.result()
    assert (status, answer["error"]["code"]) in ((502, "prefill_failed"), (503, "prefill_unavailable"))
    status, _, answer = post(router, completion(other))
    assert (status, answer["error"]["code"]) in ((502, "prefill_failed"), (503, "prefill_unavailable"))
    pair.prefill.start()
    pair.prefill.wait_until_ready()
    router.wait_until_ready()
    assert tokens_of(post(router, completion(other))[2]) == alone(spec.model, other)
    router.until_idle()
