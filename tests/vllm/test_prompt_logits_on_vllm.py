"""Answers that tell of the prompt's logits, behind a proxy that knows nothing of them: those of a single server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from answers import prompts_of, wait_until_free
from crossing import metric
from proxy import REMOTE_DECODE
from servers import PLAIN, Pair, PairSpec
from test_middleware_on_vllm import MESSAGES, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DECLINED = "vllm:kvferry_declined_transfers_total"
# Long before the leases of these pairs end.
FREE_S = 10.0
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt_logprobs": (COMPLETIONS, {"prompt_logprobs": 2}),
    "prompt_logprobs of 0": (COMPLETIONS, {"prompt_logprobs": 0}),
    "echo with logprobs": (COMPLETIONS, {"echo": True, "logprobs": 2}),
    "prompt_logprobs in a chat": (CHAT, {"prompt_logprobs": 2}),
}


def body_of(path: str, salt: str, prompt: list[int]) -> dict[str, Any]:
    content = {"messages": MESSAGES} if path == CHAT else {"prompt": prompt}
    common = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**common, **content, "cache_salt": salt}


def numbers(value: object) -> Iterator[float]:
    """Every number of an answer, in its order."""
    match value:
        case dict():
            for name in sorted(value, key=str):
                yield from numbers(value[name])
        case list():
            for item in value:
                yield from numbers(item)
        case int() | float():
            yield float(value)


def told(text: bytes) -> dict[str, Any]:
    """What an answer says of its prompt and of what was generated."""
    choice = json.loads(text)["choices"][0]
    names = ("prompt_logprobs", "logprobs", "token_ids", "prompt_token_ids")
    return {name: choice.get(name) for name in names}


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("name", ASKS)
def test_an_answer_that_tells_of_its_prompt_is_that_of_a_single_server(pair: Pair, spec: PairSpec, name: str) -> None:
    path, asks = ASKS[name]
    prompt = list(prompts_of((300,))[0].prompt)
    body, before = body_of(path, f"divided-{name}", prompt) | asks, metric(pair.decode.url, DECLINED)
    status, _, text = post(pair.prefill.url, path, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
    assert status == 200, text
    params = json.loads(text)["kv_transfer_params"]
    status, headers, text = post(pair.decode.url, path, body | {"kv_transfer_params": params}, f"divided-{name}")
    assert (status, headers["x-kvferry-cache"]) == (200, "recomputed"), text
    assert headers["x-kvferry-cache-reason"] == "prompt_logprobs"
    found, (_, _, text) = told(text), post(pair.decode.url, path, body | {"cache_salt": f"alone-{name}"})
    expected = told(text)
    assert found["token_ids"] == expected["token_ids"]
    assert list(numbers(found)) == pytest.approx(list(numbers(expected)), abs=1e-4)
    assert len(list(numbers(found))) > len(prompt) or path == CHAT
    assert metric(pair.decode.url, DECLINED) - before == 1
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("asks", [{"logprobs": 2}, {"echo": True}], ids=["logprobs", "echo"])
def test_logits_of_the_answer_and_the_prompts_text_need_no_prompt_here(
    pair: Pair, spec: PairSpec, asks: dict[str, Any]
) -> None:
    prompt = list(prompts_of((300,))[0].prompt)
    body = body_of(COMPLETIONS, f"received-{asks}", prompt) | asks
    _, _, text = post(pair.prefill.url, COMPLETIONS, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
    request = body | {"kv_transfer_params": json.loads(text)["kv_transfer_params"]}
    status, headers, text = post(pair.decode.url, COMPLETIONS, request, f"received-{'-'.join(asks)}")
    assert (status, headers["x-kvferry-cache"]) == (200, "received"), text
    wait_until_free(pair.servers, FREE_S)
