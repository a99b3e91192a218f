"""Prompts for two servers, one of them SGLang's at least: both get one at once, with a room, as of its own router."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from other_engines import Other
from sglang_servers import Pair, SGLangServer
from tiny_models import VOCAB_SIZE, model_folder

from kvferry.kv_transfer_params import room_params

NUM_NEW_TOKENS = 16
ANSWER_S = 120
Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has said: the tokens, or an error."""

    tokens: list[int]
    error: str
    meta: dict[str, Any]


def prompts_of(sizes: Sequence[int], seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB_SIZE) for _ in range(size)] for size in sizes]


@cache
def _whole_model(model: str) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=torch.float32)
    return loaded.eval()


def alone(model: str, prompt: Prompt, num_tokens: int = NUM_NEW_TOKENS) -> list[int]:
    """The control: what the model says to a prompt in transformers, without any transfer."""
    import torch

    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = _whole_model(model).generate(torch.tensor([prompt]), **settings)
    return list(map(int, tokens[0, len(prompt) :]))


def first_logprobs(model: str, prompt: Prompt) -> Any:
    """The control: logarithms of the probabilities of the token after a prompt."""
    import torch

    with torch.no_grad():
        return torch.log_softmax(_whole_model(model)(torch.tensor([prompt])).logits[0, -1], -1)


def post(server: SGLangServer, prompt: Prompt, room: int, port: int, within_s: float = ANSWER_S, **more: Any) -> Answer:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
        **more,
    }
    answer = _post(f"{server.url}/generate", body, within_s)
    return Answer([], answer, {}) if isinstance(answer, str) else Answer(answer["output_ids"], "", answer["meta_info"])


def _post(url: str, body: dict[str, Any], within_s: float) -> Any:
    """The decoded answer; the text of an error, after the reason that kvferry gives for it."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=within_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return error.headers.get("x-kvferry-cache-reason", "") + error.read().decode()
    except OSError as error:
        return repr(error)


def post_to_other(other: Other, prompt: Prompt, num_tokens: int, params: dict[str, Any], **more: Any) -> Answer:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        # By its name vLLM's middleware knows why the cache of a request did not come.
        "request_id": f"{random.getrandbits(62):x}",
        "kv_transfer_params": params,
        **more,
    }
    answer = _post(f"{other.url}/v1/completions", body, ANSWER_S)
    return Answer([], answer, {}) if isinstance(answer, str) else Answer(answer["choices"][0]["token_ids"], "", answer)


def from_other(other: Other, decode: SGLangServer, prompt: Prompt, for_prefill: Prompt | None = None) -> Answer:
    """What SGLang says to a prompt that another engine has computed, or to one whose room has another's cache."""
    room = random.getrandbits(62)
    params = {"do_remote_decode": True, "kvferry": {"room": room}}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(post_to_other, other, for_prefill or prompt, 1, params)
        answer = post(decode, prompt, room, other.transfer_port)
        # A reader that has found the cache of another prompt may have left before this one has answered.
        assert prefill.result().error == "" or for_prefill
    return answer


def to_other(prefill: SGLangServer, other: Other, prompt: Prompt, for_prefill: Prompt | None = None) -> Answer:
    """What another engine says to a prompt that SGLang has computed, or to one whose room has another's cache."""
    room, port = random.getrandbits(62), prefill.bootstrap_port
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(post, prefill, for_prefill or prompt, room, port)
        answer = post_to_other(other, prompt, NUM_NEW_TOKENS, room_params(room, "127.0.0.1", port))
        assert bool(computed.result().error) == bool(for_prefill)
    return answer


def ask(pair: Pair, prompt: Prompt, for_prefill: Prompt | None = None, **more: Any) -> tuple[Answer, Answer]:
    """What the prefill and the decode server say to a prompt; with `for_prefill` the first gets another one."""
    room, port = random.getrandbits(62), pair.prefill.bootstrap_port
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(post, pair.prefill, for_prefill or prompt, room, port, **more)
        decode = pool.submit(post, pair.decode, prompt, room, port, **more)
        return prefill.result(), decode.result()


def ask_all(pair: Pair, prompts: Sequence[Prompt]) -> list[Answer]:
    """What the decode server says to prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [decode for _, decode in pool.map(lambda prompt: ask(pair, prompt), prompts)]
