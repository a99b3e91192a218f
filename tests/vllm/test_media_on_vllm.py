"""Whatever decides a cache beside tokens, between servers of one and of two ranks that both cache prefixes: what one
server computes and another goes on with is what a single server answers, and nothing else is ever gone on with."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers import Comparison, difference, loaded_tokens, wait_until_free
from crossing import metric, route
from proxy import REMOTE_DECODE, Answer
from servers import Pair, PairSpec, Server, ServerSpec, StartError
from test_images_on_vllm import CHAT, FREE_S, TEXT, image
from test_middleware_on_vllm import post
from tiny_models import COMMON
from tiny_processors import NUM_IMAGE_TOKENS

pytestmark = pytest.mark.full

COMPLETIONS = "/v1/completions"
HITS = "vllm:prefix_cache_hits_total"
EARLY = "kvferry_router_early_decodes_total"
BLOCK_TOKENS = 128
NUM_TOKENS = 8
# Of log-probabilities, which differ by a hundredth of it or so where nothing else does.
CLEAR = 0.01
RATE = 16_000
HIDDEN: int = COMMON["hidden_size"]
Body = dict[str, Any]
_numbers = itertools.count()


def pair_of(model: str, *flags: str, tp: int = 1) -> PairSpec:
    """Either may prefill."""
    prefill, decode = (ServerSpec("kv_both", tp=ranks, flags=flags) for ranks in (tp, 1))
    return PairSpec(model, prefill, decode, failure_policy="recompute", lease_s=60)


def text(words: str = TEXT) -> Body:
    return {"type": "text", "text": words}


def picture(seed: int) -> Body:
    return {"type": "image_url", "image_url": {"url": image(seed)}}


def sound(seed: int) -> Body:
    """A second of tones."""
    chooser, times, held = random.Random(seed), np.arange(RATE // 4) / RATE, io.BytesIO()
    tones = np.concatenate([np.sin(2 * np.pi * chooser.uniform(100, 4000) * times) for _ in range(4)])
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((20_000 * tones).astype("<i2").tobytes())
    data = base64.b64encode(held.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def saved(tensor: torch.Tensor) -> str:
    held = io.BytesIO()
    torch.save(tensor, held)
    return base64.b64encode(held.getvalue()).decode()


def embeddings(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def embedded_picture(seed: int) -> Body:
    return {"type": "image_embeds", "image_embeds": saved(embeddings(NUM_IMAGE_TOKENS, seed))}


def embedded_text(seed: int) -> Body:
    return {"type": "prompt_embeds", "data": saved(embeddings(60, seed))}


def chat(*content: Body, **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": list(content)}], "logprobs": True, **fields}


def completion(**fields: Any) -> Body:
    return {"logprobs": 1, **fields}


# Several images anywhere, their tokens in planes, layers with windows, other ranks on the other side.
PLANES = pair_of("paddle_ocr", tp=2)
SEEING = pair_of("blip2", "--enable-mm-embeds", "--enable-prompt-embeds", "--trust-request-mm-kwargs")
HEARING = pair_of("qwen2_audio")
# What is asked, and what differs with the number: the last of what is not text.
MIXES: dict[str, tuple[PairSpec, Callable[[int], Body]]] = {
    "an image": (PLANES, lambda seed: chat(text(), picture(seed), text())),
    "several images": (PLANES, lambda seed: chat(picture(1), text(), picture(2), picture(seed), text())),
    "images at both ends": (PLANES, lambda seed: chat(picture(1), text(), picture(seed))),
    "an image's embeddings": (SEEING, lambda seed: chat(embedded_picture(seed), text())),
    "an image and embeddings": (SEEING, lambda seed: chat(picture(1), text(), embedded_text(seed), text())),
    "sounds": (HEARING, lambda seed: chat(sound(1), text(), sound(seed), text())),
    "embeddings": (SEEING, lambda seed: completion(prompt_embeds=saved(embeddings(300, seed)))),
    "embeddings and tokens": (SEEING, lambda seed: chat(text(), embedded_text(1), embedded_text(seed), text())),
}


def mixes(*names: str) -> pytest.MarkDecorator:
    """With every direction in which the number of ranks differs."""
    chosen = [(name, MIXES[name][0]) for name in names or MIXES]
    cases = [(spec, mix, way) for mix, spec in chosen for way in ((False, True) if spec.prefill.tp > 1 else (False,))]
    ids = [f"{mix}, {'reverse' if way else str(spec.prefill.tp) + ' to 1'}" for spec, mix, way in cases]
    return pytest.mark.parametrize(("spec", "mix", "is_reverse"), cases, ids=ids)


def asked(body: Body, salt: str) -> Body:
    common = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**common, "return_token_ids": True, "cache_salt": salt, **body}


def answered(server: Server, body: Body) -> tuple[Answer, dict[str, str]]:
    """The answer with its log-probabilities, and its headers."""
    path = CHAT if "messages" in body else COMPLETIONS
    status, headers, told = post(server.url, path, body, f"media-{next(_numbers)}")
    assert status == 200, told
    return answer_of(json.loads(told)), headers


def answer_of(document: Body) -> Answer:
    choice = document["choices"][0]
    logprobs = choice["logprobs"]
    found = [one["logprob"] for one in logprobs["content"]] if "content" in logprobs else logprobs["token_logprobs"]
    return Answer(tuple(choice["token_ids"]), tuple(found), "", document.get("kv_transfer_params"))


def reference(server: Server, body: Body) -> Any:
    found, _ = answered(server, body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
    assert found.params is not None
    return found.params


def salts(num: int) -> list[str]:
    return [f"media-{next(_numbers)}" for _ in range(num)]


@pytest.fixture
def way(pair: Pair, is_reverse: bool) -> tuple[Server, Server]:
    """Who prefills and who decodes."""
    return pair.servers[::-1] if is_reverse else pair.servers


def problem(spec: PairSpec, way: tuple[Server, Server], body: Body, moved: Answer) -> str:
    """What is wrong with an answer, beside those of both servers alone."""
    own, control = (answered(server, asked(body, salt))[0] for server, salt in zip(way, salts(2), strict=True))
    return Comparison(0, own, control, moved, spec.computes_in).problem


@mixes()
def test_what_one_server_sees_another_goes_on_with(way: tuple[Server, Server], spec: PairSpec, mix: str) -> None:
    (source, target), body, (salt,) = way, MIXES[mix][1](7), salts(1)
    params, before = reference(source, asked(body, salt)), loaded_tokens(target)
    moved, headers = answered(target, asked(body, salt) | {"kv_transfer_params": params})
    assert headers["x-kvferry-cache"] == "received", headers
    assert loaded_tokens(target) - before > BLOCK_TOKENS
    assert problem(spec, way, body, moved) == ""
    wait_until_free(way, FREE_S)


@mixes()
def test_what_another_prompt_has_left_is_not_gone_on_with(way: tuple[Server, Server], spec: PairSpec, mix: str) -> None:
    """Nor kept: the same question finds its own blocks in the prefix cache afterwards."""
    (source, target), body, (salt,) = way, MIXES[mix][1], salts(1)
    theirs, ours = body(7), body(8)
    seen = [answered(source, asked(one, salts(1)[0]))[0] for one in (theirs, ours)]
    assert difference(*seen) > CLEAR, "the model does not look at what differs"
    params = reference(source, asked(theirs, salt))
    for more in ({"kv_transfer_params": params}, {}):
        moved, headers = answered(target, asked(ours, salt) | more)
        assert problem(spec, way, ours, moved) == ""
        if more:
            assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", "wrong_prompt")
    wait_until_free(way, FREE_S)


@mixes("several images", "sounds", "embeddings and tokens")
def test_a_conversation_goes_on_behind_what_both_have_cached(
    way: tuple[Server, Server], spec: PairSpec, mix: str
) -> None:
    (source, target), body, (salt,) = way, MIXES[mix][1], salts(1)
    turns = list(body(7)["messages"])
    for seed in (8, 9):
        params = reference(source, asked(chat() | {"messages": turns}, salt))
        answered(target, asked(chat() | {"messages": turns}, salt) | {"kv_transfer_params": params})
        turns += [{"role": "assistant", "content": "It does."}, *body(seed)["messages"]]
    last = chat() | {"messages": turns}
    hits, before = [server.metric(HITS) for server in way], loaded_tokens(target)
    params = reference(source, asked(last, salt))
    moved, headers = answered(target, asked(last, salt) | {"kv_transfer_params": params})
    assert headers["x-kvferry-cache"] == "received"
    assert all(server.metric(HITS) - hit >= BLOCK_TOKENS for server, hit in zip(way, hits, strict=True))
    assert loaded_tokens(target) > before
    assert problem(spec, way, last, moved) == ""
    wait_until_free(way, FREE_S)


SAID: dict[str, tuple[Body, str]] = {
    "another salt": ({"cache_salt": "another"}, "wrong_prompt"),
    "another processor": ({"mm_processor_kwargs": {"do_rescale": False}}, "wrong_prompt"),
    "logits of the prompt": ({"prompt_logprobs": 2}, "prompt_logprobs"),
}


@pytest.mark.parametrize(("spec", "is_reverse", "said"), [(SEEING, False, said) for said in SAID], ids=SAID)
def test_what_a_request_says_beside_an_image_may_need_another_cache(
    way: tuple[Server, Server], spec: PairSpec, said: str
) -> None:
    (source, target), (more, reason), (salt,) = way, SAID[said], salts(1)
    body = chat(picture(1), text())
    params = reference(source, asked(body, salt))
    moved, headers = answered(target, asked(body | more, salt) | {"kv_transfer_params": params})
    assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", reason)
    assert problem(spec, way, body | more, moved) == ""
    wait_until_free(way, FREE_S)


def test_a_model_with_an_encoder_is_refused_when_it_starts(tmp_path: Path) -> None:
    spec = pair_of("whisper", "--max-model-len", "448")
    server = Server(spec, spec.prefill, "FerryConnector", tmp_path / "prefill.log")
    with pytest.raises(StartError, match=r"found: an encoder-decoder model.*serve it without"), server.running():
        pass


# How a router asks: decode after prefill, or both at once.
ASKED: dict[str, tuple[str, ...]] = {"in turn": (), "at once": ("--early-decode-from", "1")}


@pytest.fixture(params=ASKED)
def router(pair: Pair, spec: PairSpec, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, float]]:
    """Its address, and how many decode requests it sends before their prefill has ended, of one: of layers with windows
    nothing leaves before."""
    with route(pair.prefill.url, pair.decode.url, tmp_path / "router.log", *ASKED[request.param]) as url:
        yield url, float(request.param == "at once" and spec is not PLANES)


@pytest.mark.parametrize(("spec", "mix"), [(spec, mix) for mix, (spec, _) in MIXES.items()], ids=MIXES)
def test_behind_our_router_it_is_the_same(pair: Pair, router: tuple[str, float], spec: PairSpec, mix: str) -> None:
    (url, num_early), body, (salt,) = router, MIXES[mix][1](7), salts(1)
    before = loaded_tokens(pair.decode)
    path = CHAT if "messages" in body else COMPLETIONS
    status, headers, told = post(url, path, asked(body, salt))
    assert (status, headers["x-kvferry-path"]) == (200, "disaggregated"), told
    assert loaded_tokens(pair.decode) - before > BLOCK_TOKENS
    assert metric(url, EARLY) == num_early
    assert problem(spec, pair.servers, body, answer_of(json.loads(told))) == ""
    wait_until_free(pair.servers, FREE_S)
