"""Prompts for a pair of SGLang servers, as its own router sends them: to both at once, with a room that names both."""

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

from sglang_servers import Pair, SGLangServer
from tiny_models import VOCAB_SIZE, model_folder

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
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=within_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return Answer([], error.read().decode(), {})
    except OSError as error:
        return Answer([], repr(error), {})
    return Answer(answer["output_ids"], "", answer["meta_info"])


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
