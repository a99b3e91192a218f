"""A model that sees: one text with two images is two prompts, for the transfer and for the prefix cache behind it."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from answers import loaded_tokens, wait_until_free
from proxy import REMOTE_DECODE
from servers import Pair, PairSpec, Server
from test_middleware_on_vllm import post

CHAT = "/v1/chat/completions"
FREE_S = 30.0
BLOCK_TOKENS = 128
SEEING = PairSpec("blip2", failure_policy="recompute", lease_s=30)
# With both of its caches off vLLM only numbers images, and two servers give the same numbers.
NUMBERED = replace(
    SEEING,
    prefill=replace(SEEING.prefill, flags=("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")),
    decode=replace(SEEING.decode, flags=("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")),
)
# The same identifiers, of other pixels.
OPTION = ("--mm-processor-kwargs", '{"do_rescale": false}')
UNLIKE = replace(SEEING, decode=replace(SEEING.decode, flags=OPTION))
TEXT = "What does the ferry carry across the river at night? " * 12
DECLINED = "vllm:kvferry_declined_transfers_total"
_numbers = itertools.count()


def image(seed: int) -> str:
    """A picture that is nothing but noise, as a URL."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(56 * 56 * 3)
    held = io.BytesIO()
    Image.frombytes("RGB", (56, 56), pixels).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def asked(url: str, salt: str, num_tokens: int = 12) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def answered(server: Server, body: dict[str, Any]) -> tuple[list[int], dict[str, str]]:
    """The answer's tokens, and its headers."""
    status, headers, text = post(server.url, CHAT, body, f"image-{next(_numbers)}")
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"], headers


def reference(server: Server, body: dict[str, Any]) -> Any:
    """What a prefill request answers with."""
    _, _, text = post(server.url, CHAT, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
    return json.loads(text)["kv_transfer_params"]


def salts() -> tuple[str, str]:
    """One for both requests, and one for an answer that meets no cached prefix."""
    number = next(_numbers)
    return f"both-{number}", f"alone-{number}"


@pytest.mark.parametrize("spec", [SEEING], ids=str)
def test_the_cache_of_an_image_is_good_for_that_image(pair: Pair, spec: PairSpec) -> None:
    both, alone = salts()
    before = loaded_tokens(pair.decode)
    params = reference(pair.prefill, asked(image(1), both))
    tokens, headers = answered(pair.decode, asked(image(1), both) | {"kv_transfer_params": params})
    assert headers["x-kvferry-cache"] == "received"
    assert loaded_tokens(pair.decode) - before > BLOCK_TOKENS
    assert tokens == answered(pair.decode, asked(image(1), alone))[0]
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [SEEING], ids=str)
def test_the_cache_of_another_image_is_not_used_and_not_kept(pair: Pair, spec: PairSpec) -> None:
    (both, alone), (theirs, ours) = salts(), (image(2), image(3))
    expected = answered(pair.decode, asked(ours, alone))[0]
    assert expected != answered(pair.decode, asked(theirs, alone))[0], "the model does not look at images"
    params = reference(pair.prefill, asked(theirs, both))
    tokens, headers = answered(pair.decode, asked(ours, both) | {"kv_transfer_params": params})
    assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", "wrong_prompt")
    assert tokens == expected
    assert answered(pair.decode, asked(ours, both))[0] == expected
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [SEEING], ids=str)
def test_a_reference_without_an_image_is_not_good_for_one(pair: Pair, spec: PairSpec) -> None:
    """The tokens are equal where the place of the image is written out."""
    both, alone = salts()
    body = asked(image(4), both)
    _, _, text = post(pair.prefill.url, "/tokenize", {"model": "tiny", "messages": body["messages"]})
    prompt = {"model": "tiny", "prompt": json.loads(text)["tokens"], "max_tokens": 1, "cache_salt": both}
    status, _, text = post(pair.prefill.url, "/v1/completions", prompt | {"kv_transfer_params": REMOTE_DECODE})
    assert status == 200, text
    params = json.loads(text)["kv_transfer_params"]
    tokens, headers = answered(pair.decode, body | {"kv_transfer_params": params})
    assert headers["x-kvferry-cache-reason"] in ("wrong_prompt", "out_of_range")
    assert tokens == answered(pair.decode, asked(image(4), alone))[0]
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.full
@pytest.mark.parametrize("spec", [NUMBERED], ids=["numbered"])
def test_images_that_are_only_numbered_are_computed_where_they_are_answered(pair: Pair, spec: PairSpec) -> None:
    both, _ = salts()
    assert reference(pair.prefill, asked(image(5), both)) is None
    assert pair.prefill.metric(DECLINED) == 1
    expected = answered(pair.decode, asked(image(6), both))[0]
    stranger = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r"}
    stranger["kvferry"] = {"epoch": "e", "lease_id": "l", "addresses": ["tcp://127.0.0.1:1"]}
    tokens, headers = answered(pair.decode, asked(image(6), both) | {"kv_transfer_params": stranger})
    assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", "unnamed_prompt")
    assert tokens == expected
    assert pair.decode.metric(DECLINED) == 1
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.full
@pytest.mark.parametrize("spec", [UNLIKE], ids=["unlike"])
def test_an_image_that_two_servers_make_something_else_of_is_another_one(pair: Pair, spec: PairSpec) -> None:
    both, alone = salts()
    expected = answered(pair.decode, asked(image(7), alone))[0]
    assert expected != answered(pair.prefill, asked(image(7), alone))[0], "the option changes nothing"
    params = reference(pair.prefill, asked(image(7), both))
    tokens, headers = answered(pair.decode, asked(image(7), both) | {"kv_transfer_params": params})
    assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", "wrong_prompt")
    assert tokens == expected
    wait_until_free(pair.servers, FREE_S)
