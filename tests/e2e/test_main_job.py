"""One prefill engine, one decode engine with another block size, one router: real processes, real model."""

import concurrent.futures
import json
import random
import urllib.error
import urllib.request

import openai
import pytest
from conftest import BYTES_PER_TOKEN, DEADLINE_S, both, eventually, metric, post


@pytest.fixture(scope="module")
def fleet(start_fleet):
    return start_fleet(decode_block_tokens=32)


def prompt_of(num_tokens, seed=0):
    return [random.Random(seed * 10_000 + i).randrange(300, 1000) for i in range(num_tokens)]


def all_free(url):
    return metric(url, 'kvferry_engine_blocks{state="granted"}') == 0


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 32, 33, 100, 2500])
def test_the_answer_is_the_undisaggregated_one_and_only_the_last_token_is_computed(fleet, num_tokens):
    answer, alone = both(fleet, prompt_of(num_tokens))
    assert answer.token_ids == alone.token_ids
    assert len(answer.token_ids) == 12
    report = answer.report
    assert (report["tokens_computed"], report["tokens_received"]) == (1, num_tokens - 1)
    assert report["bytes"] == (num_tokens - 1) * BYTES_PER_TOKEN
    assert report["recomputed"] == ""
    assert set(report["phases_s"]) == {"queue", "handshake", "claim", "wire", "verify"}
    assert alone.report["tokens_computed"] == num_tokens


def test_counters_say_what_was_computed_and_what_was_received(fleet):
    (url,) = fleet.decode_urls
    names = ("kvferry_engine_tokens_computed_total", "kvferry_engine_tokens_received_total")
    before = [metric(url, name) for name in names]
    body = {"model": "tiny", "prompt": prompt_of(50), "max_tokens": 3}
    post(f"{fleet.url}/v1/completions", body)
    assert [metric(url, name) - start for name, start in zip(names, before, strict=True)] == [1, 49]


def test_concurrent_requests_do_not_mix(fleet):
    prompts = [prompt_of(random.Random(seed).randrange(1, 400), seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for answer, alone in pool.map(lambda prompt: both(fleet, prompt), prompts):
            assert answer.token_ids == alone.token_ids
            assert answer.report["tokens_computed"] == 1


def test_an_openai_client_streams_and_chats(fleet):
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("other")
        messages = [{"role": "user", "content": "When does the ferry leave?"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
        with client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=10, temperature=0, stream=True
        ) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 10


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "JSON"),
        (b'{"model": "tiny"}', 400, "prompt"),
        (b'{"model": "nope", "prompt": "x"}', 404, "does not exist"),
        (json.dumps({"model": "tiny", "prompt": [5] * 9000}).encode(), 400, "shorten the prompt"),
        (b'{"model": "tiny", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}}', 400, "kv_transfer"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
    ],
)
def test_bad_requests_get_an_openai_error(fleet, body, status, says):
    request = urllib.request.Request(f"{fleet.url}/v1/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=DEADLINE_S)
    with caught.value as error:
        assert error.code == status
        assert says in json.load(error)["error"]["message"]


def test_a_client_that_goes_away_leaves_nothing_behind(fleet):
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        prompt = prompt_of(200, seed=5)
        stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=5000, temperature=0, stream=True)
        next(iter(stream))
        stream.close()
    (url,) = fleet.decode_urls
    eventually(lambda: all_free(url), "the decode engine's blocks are free")


def test_after_all_of_this_every_block_is_free_on_both_sides(fleet):
    for url in (*fleet.decode_urls, *fleet.prefill_urls):
        eventually(lambda url=url: all_free(url), f"{url} has no blocks in use")
