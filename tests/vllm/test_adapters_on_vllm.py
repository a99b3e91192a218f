"""Caches that tokens alone do not decide, on real servers: LoRA adapters by their content, and prompt embeddings."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter import make_adapter
from answers import prompts_of, wait_until_free
from proxy import REMOTE_DECODE
from servers import Pair, PairSpec, Server, ServerSpec
from test_middleware_on_vllm import post

COMPLETIONS = "/v1/completions"
FREE_S = 30.0
FOLDER = Path(tempfile.gettempdir()) / f"kvferry-adapters-{os.getpid()}"
SEEDS = {"first": 1, "copy-of-first": 1, "second": 2, "replaced": 1, "unused": 1, "again": 1, "before": 1, "after": 2}
FLAGS = (
    "--enable-lora",
    "--max-loras",
    "3",
    "--max-cpu-loras",
    "12",
    "--max-lora-rank",
    "8",
    "--enable-prompt-embeds",
    "--lora-modules",
)
# The prefill server calls `tuned` what the decode server calls `same`; and both call another one `mixed`.
AT_PREFILL = {"tuned": "first", "mixed": "first", "changing": "replaced", "unused": "unused", "again": "again"}
AT_DECODE = {"same": "copy-of-first", "mixed": "second", "tuned": "first"}
HIDDEN = 256
_numbers = itertools.count()


def serving(role: str, adapters: dict[str, str]) -> ServerSpec:
    named = (f"{name}={FOLDER / place}" for name, place in adapters.items())
    return ServerSpec(role, flags=(*FLAGS, *named), environment=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),))


ADAPTED = PairSpec("llama", serving("kv_producer", AT_PREFILL), serving("kv_consumer", AT_DECODE), "recompute", 30)


@pytest.fixture(scope="module", autouse=True)
def adapters() -> Iterator[None]:
    """Before the servers start, which are told of them on their command lines."""
    for place, seed in SEEDS.items():
        make_adapter(FOLDER / place, seed)
    yield
    shutil.rmtree(FOLDER)


def asked(model: str, salt: str, num_tokens: int = 12, **content: Any) -> dict[str, Any]:
    common = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**common, "model": model, "cache_salt": salt, **content}


def answered(server: Server, body: dict[str, Any]) -> tuple[list[int], str, str]:
    """The answer's tokens, how its cache came, and why it did not."""
    status, headers, text = post(server.url, COMPLETIONS, body, f"adapted-{next(_numbers)}")
    assert status == 200, text
    told = headers.get("x-kvferry-cache", ""), headers.get("x-kvferry-cache-reason", "")
    return json.loads(text)["choices"][0]["token_ids"], *told


def answer_of_decode(
    pair: Pair, names: tuple[str, str], contents: tuple[dict[str, Any], dict[str, Any]], salt: str
) -> Any:
    """The decode request's answer; each request has its own name of the model, and its own prompt."""
    first = asked(names[0], salt, 1, **contents[0]) | {"kv_transfer_params": REMOTE_DECODE}
    status, _, text = post(pair.prefill.url, COMPLETIONS, first)
    assert status == 200, text
    params = json.loads(text)["kv_transfer_params"]
    return answered(pair.decode, asked(names[1], salt, **contents[1]) | {"kv_transfer_params": params})


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("tuned", "tuned"), ("received", "")),
        (("tuned", "same"), ("received", "")),
        (("mixed", "mixed"), ("recomputed", "wrong_prompt")),
        (("tuned", "tiny"), ("recomputed", "wrong_prompt")),
        (("tiny", "same"), ("recomputed", "wrong_prompt")),
        (("tiny", "tiny"), ("received", "")),
    ],
    ids=lambda value: "-".join(value),
)
def test_adapters_are_told_apart_by_what_they_hold(
    pair: Pair, spec: PairSpec, names: tuple[str, str], told: tuple[str, str]
) -> None:
    prompt, salt = {"prompt": list(prompts_of((300,))[0].prompt)}, f"adapter-{next(_numbers)}"
    expected, *_ = answered(pair.decode, asked(names[1], f"{salt}-alone", **prompt))
    assert answer_of_decode(pair, names, (prompt, prompt), salt) == (expected, *told)
    assert answered(pair.decode, asked(names[1], salt, **prompt))[0] == expected
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
def test_the_adapters_of_these_tests_answer_differently(pair: Pair, spec: PairSpec) -> None:
    prompt = {"prompt": list(prompts_of((300,))[0].prompt)}
    answers = {model: answered(pair.decode, asked(model, "apart", **prompt))[0] for model in ("tiny", "same", "mixed")}
    assert len({tuple(tokens) for tokens in answers.values()}) == 3


def embeddings(seed: int) -> dict[str, Any]:
    import torch

    held = io.BytesIO()
    torch.save(torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.3, held)
    return {"prompt_embeds": base64.b64encode(held.getvalue()).decode()}


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
@pytest.mark.parametrize(("ours", "told"), [(1, ("received", "")), (2, ("recomputed", "wrong_prompt"))])
def test_embeddings_are_told_apart_by_what_they_are(
    pair: Pair, spec: PairSpec, ours: int, told: tuple[str, str]
) -> None:
    salt, contents = f"embeddings-{next(_numbers)}", (embeddings(1), embeddings(ours))
    expected, *_ = answered(pair.decode, asked("tiny", f"{salt}-alone", **contents[1]))
    assert answer_of_decode(pair, ("tiny", "tiny"), contents, salt) == (expected, *told)
    assert answered(pair.decode, asked("tiny", salt, **contents[1]))[0] == expected
    wait_until_free(pair.servers, FREE_S)


def early_reference(server: Server, body: dict[str, Any]) -> Any:
    """What an early prefill is promised, before anybody knows what its prompt is called. The request ends by itself."""
    early = {**REMOTE_DECODE, "kvferry": {"early": True}}
    data = json.dumps(body | {"stream": True, "kv_transfer_params": early}).encode()
    asked_for = urllib.request.Request(server.url + COMPLETIONS, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked_for, timeout=60) as answer:
        first, *_ = answer.read().decode().split("\n\n")
    return json.loads(first.removeprefix("data: "))["kv_transfer_params"]


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
def test_an_early_reference_to_what_the_prefill_server_cannot_name_says_so(pair: Pair, spec: PairSpec) -> None:
    """The files of the prefill server's adapter are replaced when it has read them."""
    prompt, salt = {"prompt": list(prompts_of((300,))[0].prompt)}, f"early-{next(_numbers)}"
    names = ("changing", "same")
    expected, *told = answer_of_decode(pair, names, (prompt, prompt), salt)
    assert told == ["received", ""]
    weights = FOLDER / "replaced" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    params = early_reference(pair.prefill, asked(names[0], f"{salt}-again", 1, **prompt))
    request = asked(names[1], f"{salt}-again", **prompt) | {"kv_transfer_params": params}
    assert answered(pair.decode, request) == (expected, "recomputed", "unnamed_prompt")
    wait_until_free(pair.servers, FREE_S)


def replace_files(place: str, seed: int) -> None:
    """As who trains an adapter and writes the new one where the old one was."""
    made = make_adapter(FOLDER / f"{place}-made-of-{seed}", seed)
    shutil.copytree(made, FOLDER / place, dirs_exist_ok=True)


def tell(server: Server, what: str, **body: Any) -> None:
    status, _, text = post(server.url, f"/v1/{what}_lora_adapter", body)
    assert status == 200, text


def reference(pair: Pair, name: str, prompt: dict[str, Any], salt: str) -> Any:
    request = asked(name, salt, 1, **prompt) | {"kv_transfer_params": REMOTE_DECODE}
    status, _, text = post(pair.prefill.url, COMPLETIONS, request)
    assert status == 200, text
    return json.loads(text)["kv_transfer_params"]


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
def test_files_that_are_replaced_before_anybody_asks_are_not_those_that_were_loaded(pair: Pair, spec: PairSpec) -> None:
    """The prefill server has loaded one adapter when it started, and there is another one in its place now."""
    replace_files("unused", 2)
    prompt = {"prompt": list(prompts_of((300,))[0].prompt)}
    assert reference(pair, "unused", prompt, f"unused-{next(_numbers)}") is None
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
def test_an_adapter_that_is_loaded_again_may_have_blocks_of_the_one_before(pair: Pair, spec: PairSpec) -> None:
    """vLLM keeps the blocks of adapters that are unloaded, and takes the new one's for the same."""
    prompt, salt = {"prompt": list(prompts_of((300,))[0].prompt)}, f"again-{next(_numbers)}"
    answered(pair.prefill, asked("again", salt, **prompt))
    tell(pair.prefill, "unload", lora_name="again")
    replace_files("again", 2)
    tell(pair.prefill, "load", lora_name="again", lora_path=str(FOLDER / "again"))
    assert reference(pair, "again", prompt, salt) is None
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [ADAPTED], ids=["adapted"])
def test_an_adapter_that_is_loaded_in_place_from_another_path_is_the_new_one(pair: Pair, spec: PairSpec) -> None:
    prompt, salt = {"prompt": list(prompts_of((300,))[0].prompt)}, f"in-place-{next(_numbers)}"
    tell(pair.prefill, "load", lora_name="trained", lora_path=str(FOLDER / "before"))
    assert answer_of_decode(pair, ("trained", "same"), (prompt, prompt), salt)[1:] == ("received", "")
    tell(pair.prefill, "load", lora_name="trained", lora_path=str(FOLDER / "after"), load_inplace=True)
    expected, *_ = answered(pair.decode, asked("mixed", f"{salt}-alone", **prompt))
    assert answer_of_decode(pair, ("trained", "mixed"), (prompt, prompt), f"{salt}-new") == (expected, "received", "")
    assert answer_of_decode(pair, ("trained", "same"), (prompt, prompt), f"{salt}-old")[1:] == (
        "recomputed",
        "wrong_prompt",
    )
    wait_until_free(pair.servers, FREE_S)
