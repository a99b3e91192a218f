"""What has landed in a vLLM server and was not found valid: its prefix cache knows nothing of it."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from answers import prompts_of, wait_until_free
from proxy import Question
from servers import ENVIRONMENT, PLAIN, Pair, PairSpec, Server
from test_middleware_on_vllm import post, prefill_params
from tiny_models import model_folder

SPOILING = Path(__file__).parents[1] / "spoiling_serve.py"
COMPLETIONS = "/v1/completions"
READY_S, STOP_S, FREE_S = 300.0, 20.0, 30.0
# Blocks of 128 tokens: several whole ones, which a prefix cache would keep.
NUM_TOKENS = 700
RECOMPUTE = replace(PLAIN, failure_policy="recompute")
_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill engine of which only noise comes; what becomes of it is written to the file `way`."""

    url: str
    way: Path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("spoiling")
    way = folder / "way"
    way.write_text("valid")
    model = ("--model", str(model_folder("llama")), "--served-name", "tiny", "--dtype", "float32")
    command = (sys.executable, str(SPOILING), str(way), "serve", "--json", "--as-child", "--port", "0", *model)
    with (folder / "log").open("wb") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen((*command, "--num-blocks", "256"), env={**os.environ, **ENVIRONMENT}, **pipes)
    try:
        assert select.select([process.stdout], [], [], READY_S)[0], (folder / "log").read_text()[-2000:]
        yield Source(json.loads(process.stdout.readline())["url"], way)
    finally:
        with process:
            process.terminate()
            try:
                # At once: it would wait longer for a lease that is still live.
                process.wait(STOP_S)
            finally:
                process.kill()


def question_of(seed: int) -> Question:
    name = f"spoiled-{next(_salts)}"
    return replace(prompts_of((NUM_TOKENS,), seed=seed)[0], salt=name, request_id=name)


def body_of(question: Question, salt: str) -> dict[str, Any]:
    common = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**common, "prompt": list(question.prompt), "cache_salt": salt}


def answered(server: Server, question: Question, salt: str, params: Any = None) -> tuple[list[int], str]:
    """The answer's tokens, and why its cache did not come."""
    request = body_of(question, salt) | ({"kv_transfer_params": params} if params else {})
    status, headers, text = post(server.url, COMPLETIONS, request, question.request_id)
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"], headers.get("x-kvferry-cache-reason", "")


@pytest.mark.parametrize("spec", [RECOMPUTE], ids=str)
@pytest.mark.parametrize(("way", "reason"), [("revoked", "expired"), ("digest", "digest")])
def test_what_is_not_valid_in_the_end_enters_no_prefix_cache(
    pair: Pair, spec: PairSpec, source: Source, way: str, reason: str
) -> None:
    question = question_of(1)
    expected, _ = answered(pair.decode, question, f"alone-{way}")
    source.way.write_text(way)
    params = prefill_params(source.url, question, COMPLETIONS)
    assert answered(pair.decode, question, question.salt, params) == (expected, reason)
    assert [answered(pair.decode, question, question.salt)[0] for _ in range(2)] == [expected] * 2
    wait_until_free([pair.decode], FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("way", ["revoked", "digest"])
def test_a_request_that_fails_with_its_cache_leaves_nothing_behind(
    pair: Pair, spec: PairSpec, source: Source, way: str
) -> None:
    question = question_of(5)
    expected, _ = answered(pair.decode, question, f"alone-failed-{way}")
    source.way.write_text(way)
    request = body_of(question, question.salt) | {
        "kv_transfer_params": prefill_params(source.url, question, COMPLETIONS)
    }
    assert post(pair.decode.url, COMPLETIONS, request, question.request_id)[0] == 502
    assert [answered(pair.decode, question, question.salt)[0] for _ in range(2)] == [expected] * 2
    wait_until_free([pair.decode], FREE_S)


@pytest.mark.parametrize("spec", [RECOMPUTE], ids=str)
def test_the_cache_of_another_prompt_enters_no_prefix_cache(pair: Pair, spec: PairSpec, source: Source) -> None:
    ours, theirs = question_of(2), question_of(3)
    expected, _ = answered(pair.decode, ours, "alone-ours")
    params = prefill_params(source.url, replace(theirs, salt=ours.salt), COMPLETIONS)
    assert answered(pair.decode, ours, ours.salt, params) == (expected, "wrong_prompt")
    assert [answered(pair.decode, ours, ours.salt)[0] for _ in range(2)] == [expected] * 2
    wait_until_free([pair.decode], FREE_S)


@pytest.mark.parametrize("spec", [RECOMPUTE], ids=str)
def test_noise_that_is_called_valid_would_be_noticed(pair: Pair, spec: PairSpec, source: Source) -> None:
    question = question_of(4)
    expected, _ = answered(pair.decode, question, "alone-noticed")
    source.way.write_text("valid")
    params = prefill_params(source.url, question, COMPLETIONS)
    found, reason = answered(pair.decode, question, question.salt, params)
    assert (found == expected, reason) == (False, "")
    assert answered(pair.decode, question, question.salt)[0] != expected
    wait_until_free([pair.decode], FREE_S)
