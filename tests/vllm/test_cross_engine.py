"""Prefill on vLLM and decode on transformers, and the reverse: every answer must be the one a single engine gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from answers import EXTERNAL_HITS, FIRST_PLAIN_TOKEN
from crossing import Crossing, Prompt, across, alone, body, crossing, get, metric, post, route, streamed
from tiny_models import VOCAB_SIZE

# One token, below a block, exactly blocks, one more, beyond a window of 192, and sizes that no block divides.
SIZES = (1, 2, 16, 17, 63, 64, 65, 129, 193, 300, 700)
AT_ONCE = (17, 64, 129, 300)
CASES = (
    ("llama", (128, 16)),
    ("qwen3", (32, 48)),
    ("mistral", (64, 16)),
    pytest.param(("gemma3", (64, 16)), marks=pytest.mark.full),
)
DIRECTIONS = pytest.mark.parametrize("to_vllm", [False, True], ids=["vLLM to ours", "ours to vLLM"])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def engines(request: pytest.FixtureRequest, running, tmp_path_factory) -> Iterator[Crossing]:
    model, block_tokens = request.param
    running.stop()
    with crossing(model, block_tokens, tmp_path_factory.mktemp(f"crossing-{model}")) as both:
        yield both


def prompts(sizes, name) -> list[Prompt]:
    chooser = random.Random(name)
    return [
        Prompt(tuple(chooser.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(size)), f"{name}-{i}-{size}")
        for i, size in enumerate(sizes)
    ]


def check(engines: Crossing, to_vllm: bool, asked: list[Prompt], at_once: int = 1) -> None:
    both = engines.transformers, engines.vllm
    source, target = both if to_vllm else both[::-1]
    before = metric(engines.vllm.url, EXTERNAL_HITS)
    with ThreadPoolExecutor(at_once) as pool:
        moved = list(pool.map(lambda prompt: across(source, target, prompt), asked))
    loaded = metric(engines.vllm.url, EXTERNAL_HITS) - before
    wanted = [len(prompt.token_ids) - 1 for prompt in asked]
    if to_vllm:
        assert loaded == sum(wanted)
    else:
        assert [answer["kvferry"]["tokens_received"] for answer in moved] == wanted
        assert [answer["kvferry"]["tokens_computed"] for answer in moved] == [1] * len(asked)
    for prompt, answer in zip(asked, moved, strict=True):
        own = [tokens(alone(engine, prompt)) for engine in both]
        assert own[0] == own[1], f"inconclusive: the engines differ on {len(prompt.token_ids)} tokens by themselves"
        assert tokens(answer) == own[0], f"{len(prompt.token_ids)} tokens"


def tokens(answer) -> list[int]:
    found = answer["choices"][0]["token_ids"]
    assert len(found) > 1
    return found


@DIRECTIONS
def test_the_cache_of_one_engine_is_good_for_the_other(engines, to_vllm):
    check(engines, to_vllm, prompts(SIZES, f"one by one {to_vllm}"))


@DIRECTIONS
def test_requests_at_once(engines, to_vllm):
    check(engines, to_vllm, prompts(AT_ONCE, f"at once {to_vllm}"), at_once=4)


@DIRECTIONS
def test_our_router_mixes_engines(engines, to_vllm, tmp_path):
    source, target = (engines.transformers, engines.vllm)[:: 1 if to_vllm else -1]
    (prompt,) = prompts((129,), f"router {to_vllm}")
    with route(source.url, target.url, tmp_path / "router.log") as url:
        answer = post(url, body(prompt, prompt.num_tokens))
        members = get(f"{url}/kvferry/members")["members"]
    # By this the router knows that the two can exchange a cache.
    assert len({member["cache"] for member in members} - {""}) == 1
    assert answer["cache"] == "received"
    assert answer["path"] == "disaggregated"
    assert tokens(answer) == tokens(alone(target, prompt))


EARLY = {"do_remote_decode": True, "kvferry": {"early": True}}


@DIRECTIONS
def test_a_reference_that_comes_before_the_prompt_is_computed(engines, to_vllm):
    """Of models with windows too: there all of it is told at the end."""
    source, target = (engines.transformers, engines.vllm)[:: 1 if to_vllm else -1]
    asked = prompts((17, 700, 3000), f"early {to_vllm}")
    with ThreadPoolExecutor(len(asked)) as pool:
        pending = [pool.submit(early, source, target, prompt) for prompt in asked]
        answers = [answer.result() for answer in pending]
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer["cache"] == "received"
        assert tokens(answer) == tokens(alone(target, prompt))


def early(source, target, prompt) -> dict[str, Any]:
    """Both requests at once; the decode request's answer."""
    asked = body(prompt, 1) | {"stream": True, "kv_transfer_params": EARLY}
    with streamed(source.url, asked) as events:
        params = next(events)["kv_transfer_params"]
        headers = {"X-Request-Id": f"early-{len(prompt.token_ids)}"}
        answer = post(target.url, body(prompt, prompt.num_tokens) | {"kv_transfer_params": params}, headers=headers)
        assert any(event["choices"] for event in events)
    return answer
