"""One vLLM server and one of our own engines side by side, and a router in front: all started by `kvferry` itself."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from proxy import REMOTE_DECODE
from servers import DEVICE, ENVIRONMENT, GPU_FLAGS
from tiny_models import MODELS, model_folder

from kvferry.cli.child_processes import Child

__all__ = [
    "Crossing",
    "Engine",
    "Prompt",
    "across",
    "alone",
    "body",
    "crossing",
    "get",
    "metric",
    "post",
    "route",
    "streamed",
]

JSON = {"content-type": "application/json", "x-kvferry-report": "true"}
READY_S = 300.0
ANSWER_S = 300.0
CACHE_BYTES = 128 << 20
NUM_BLOCKS = 1024
VLLM_ARGUMENTS = (
    *("--max-model-len", "8192", "--max-num-seqs", "16", "--seed", "0", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(CACHE_BYTES)),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that serves `tiny`; `kind` is `vllm` or `transformers`."""

    kind: str
    url: str


@dataclass(frozen=True, slots=True)
class Crossing:
    """The same model on both engines."""

    model: str
    vllm: Engine
    transformers: Engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids; only prompts with the same `salt` share cached prefixes."""

    token_ids: tuple[int, ...]
    salt: str
    num_tokens: int = 12


@contextmanager
def crossing(model: str, block_tokens: tuple[int, int], logs: Path) -> Iterator[Crossing]:
    """Both engines, ready. `block_tokens` are those of vLLM and of ours."""
    common = ("--model", str(model_folder(model)), "--served-name", "tiny", "--dtype", "float32")
    common = ("serve", "--port", "0", "--failure-policy", "fail", *common)
    more = (*VLLM_ARGUMENTS, *(MODELS[model].cpu_flags if DEVICE == "cpu" else GPU_FLAGS))
    left = ("--engine-id", "vllm", "--engine", "vllm", "--block-tokens", str(block_tokens[0]), "--", *more)
    right = ("--engine-id", "ours", "--block-tokens", str(block_tokens[1]), "--num-blocks", str(NUM_BLOCKS))
    commands = (("vllm", (*common, *left), logs / "vllm.log"), ("ours", (*common, *right), logs / "ours"))
    with _children(*commands) as (vllm, ours):
        yield Crossing(model, Engine("vllm", vllm), Engine("transformers", ours))


@contextmanager
def route(prefill: str, decode: str, log: Path, *more: str) -> Iterator[str]:
    """Our router in front of one prefill and one decode engine; its URL."""
    arguments = ("route", "--port", "0", "--prefill", prefill, "--decode", decode, *more)
    with _children(("router", arguments, log)) as (url,):
        yield url


@contextmanager
def _children(*commands: tuple[str, tuple[str, ...], Path]) -> Iterator[tuple[str, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        children = [Child(*command) for command in commands]
    try:
        deadline = time.monotonic() + READY_S
        yield tuple(str(child.wait_until_ready(deadline)["url"]) for child in children)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.stop()


def alone(engine: Engine, prompt: Prompt) -> dict[str, Any]:
    """The engine's own answer, under a salt of its own so that it meets no cached prefix."""
    return post(engine.url, body(prompt, prompt.num_tokens) | {"cache_salt": f"alone-{prompt.salt}"})


def across(source: Engine, target: Engine, prompt: Prompt) -> dict[str, Any]:
    """Prefill on one, decode on the other, as a plain proxy does it; the decode request's answer."""
    first = post(source.url, body(prompt, 1) | {"kv_transfer_params": REMOTE_DECODE})
    assert first["kv_transfer_params"], first
    return post(target.url, body(prompt, prompt.num_tokens) | {"kv_transfer_params": first["kv_transfer_params"]})


def post(
    url: str, body: dict[str, Any], path: str = "/v1/completions", headers: Mapping[str, str] = JSON
) -> dict[str, Any]:
    """The answer as JSON, with `path` and `cache` of its headers; fails with the body of an error."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, json.dumps(body), {**JSON, **headers})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, text
    told = {name: response.headers.get(f"x-kvferry-{name}", "") for name in ("path", "cache")}
    found: dict[str, Any] = json.loads(text) | told
    return found


@contextmanager
def streamed(url: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a streamed answer, until it is done or the client leaves."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        lines = (line.removeprefix(b"data: ").strip() for line in response)
        yield (json.loads(line) for line in itertools.takewhile(lambda line: line != b"[DONE]", lines) if line)
        response.close()
    finally:
        connection.close()


def get(url: str) -> Any:
    """The JSON at an address."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())


def body(prompt: Prompt, num_tokens: int) -> dict[str, Any]:
    """What both kinds of engine understand."""
    return {
        "model": "tiny",
        "prompt": list(prompt.token_ids),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": prompt.salt,
    }


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels, 0 when it has not been counted yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)
