"""What vLLM answers by itself comes out the same through our router, with our connector and with its own, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from answers import FIRST_PLAIN_TOKEN
from conftest import Running
from crossing import metric, route
from servers import PLAIN, Pair

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What belongs to one answer; and what tells of a prefix cache that one way has and the other has not.
OWN = ("id", "created", "kv_transfer_params", "prompt_tokens_details")
TEXT = "The ferry leaves the harbour at dawn, and whoever wants to catch it must be there in time. "
COMMON = {"model": "tiny", "max_tokens": 12, "temperature": 0}
COMPLETION = {**COMMON, "prompt": TEXT * 3, "return_token_ids": True, "ignore_eos": True}
TALK = {**COMMON, "messages": [{"role": "user", "content": TEXT}], "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "timetable", "description": "when it leaves", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "timetable"}}
# Name, path, body, and whether two servers answer it: one prefill cannot stand for the others.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": (COMPLETIONS, COMPLETION, True),
    "ids": (COMPLETIONS, COMPLETION | {"prompt": list(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 70))}, True),
    "logprobs": (COMPLETIONS, COMPLETION | {"logprobs": 3}, True),
    "echo": (COMPLETIONS, COMPLETION | {"echo": True}, True),
    "min tokens": (COMPLETIONS, COMPLETION | {"min_tokens": 5}, True),
    "n": (COMPLETIONS, COMPLETION | {"n": 3, "temperature": 1.0, "seed": 5}, False),
    "prompts": (COMPLETIONS, COMPLETION | {"prompt": [TEXT, TEXT * 2]}, False),
    "echo with logprobs": (COMPLETIONS, COMPLETION | {"echo": True, "logprobs": 1}, False),
    "prompt logprobs": (COMPLETIONS, COMPLETION | {"prompt_logprobs": 1}, False),
    "chat": (CHAT, TALK, True),
    "chat logprobs": (CHAT, TALK | {"logprobs": True, "top_logprobs": 2}, True),
    "newer limit": (CHAT, TALK | {"max_tokens": 40, "max_completion_tokens": 6}, True),
    "tools that are not used": (CHAT, TALK | {"tools": [TOOL], "tool_choice": "none"}, True),
    "schema": (CHAT, TALK | {"response_format": {"type": "json_object"}, "ignore_eos": False}, True),
    "chat n": (CHAT, TALK | {"n": 2, "temperature": 1.0, "seed": 3}, False),
}
STREAMS = ("plain", "logprobs", "echo", "n", "chat", "chat logprobs", "chat n")
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": (COMPLETIONS, COMPLETION | {"model": "other"}),
    "too long": (COMPLETIONS, COMPLETION | {"prompt": [FIRST_PLAIN_TOKEN] * 9000}),
    "negative": (COMPLETIONS, COMPLETION | {"top_p": -3.0}),
    "no messages": (CHAT, TALK | {"messages": []}),
    "role": (CHAT, TALK | {"messages": [{"role": 7, "content": "x"}]}),
}


@pytest.fixture(scope="module", params=["FerryConnector", "NixlConnector"])
def routed(request: pytest.FixtureRequest, running: Running, tmp_path_factory: Any) -> Iterator[tuple[Pair, str]]:
    """Two servers with a connector, and our router in front of them."""
    folder: Path = tmp_path_factory.mktemp(f"routed-{request.param}")
    running.stop()
    pair = Pair.create(PLAIN, request.param, folder)
    pair.start()
    try:
        with route(pair.prefill.url, pair.decode.url, folder / "router.log") as url:
            yield pair, url
    finally:
        pair.stop()


def send(url: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, dict(response.headers.items()), response.read()
    finally:
        connection.close()


def plain(value: Any) -> Any:
    """Without what is its own; log-probabilities come from other batches and differ in their last digits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in OWN}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return pytest.approx(value, rel=1e-3, abs=1e-3) if isinstance(value, float) else value


def frames(raw: bytes) -> list[Any]:
    """The events of a stream in their order; samples come in any order, so each is one sequence."""
    events = raw.decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return sorted(chunks, key=lambda chunk: [choice["index"] for choice in chunk["choices"]] or [99])


def joined(chunks: list[Any]) -> dict[int, Any]:
    """What each sample says in all: how many tokens share a frame is a matter of time."""
    texts: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice.get("delta") or {}
        said = texts.setdefault(choice["index"], {"text": "", "ids": [], "finish": None})
        said["text"] += choice.get("text") or delta.get("content") or ""
        said["ids"] += choice.get("token_ids") or []
        said["finish"] = choice["finish_reason"] or said["finish"]
    return texts


@pytest.mark.parametrize("name", CASES)
def test_whole_answers(routed: tuple[Pair, str], name: str) -> None:
    pair, router = routed
    path, body, divided = CASES[name]
    alone, through = send(pair.decode.url, path, body), send(router, path, body)
    assert (alone[0], through[0]) == (200, 200), (alone[2], through[2])
    assert json.loads(through[2]).keys() == json.loads(alone[2]).keys()
    assert json.loads(json.dumps(_strip(json.loads(through[2])))) == plain(_strip(json.loads(alone[2])))
    assert through[1]["x-kvferry-path"] == ("disaggregated" if divided else "decode-only")


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip(item) for key, item in value.items() if key not in OWN}
    return [_strip(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", STREAMS)
def test_streams(routed: tuple[Pair, str], name: str) -> None:
    pair, router = routed
    path, body, _ = CASES[name]
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    alone, through = send(pair.decode.url, path, body), send(router, path, body)
    assert through[1]["content-type"] == alone[1]["content-type"]
    ours, theirs = frames(through[2]), frames(alone[2])
    assert joined(ours) == joined(theirs)
    assert _strip(ours[-1]["usage"]) == _strip(theirs[-1]["usage"])


def test_a_stop_string_ends_both_at_the_same_place(routed: tuple[Pair, str]) -> None:
    pair, router = routed
    text = json.loads(send(pair.decode.url, COMPLETIONS, COMPLETION)[2])["choices"][0]["text"]
    body = COMPLETION | {"stop": [text[len(text) // 2 :][:3]]}
    alone, through = (json.loads(send(url, COMPLETIONS, body)[2]) for url in (pair.decode.url, router))
    assert _strip(through) == _strip(alone)
    assert through["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_an_engine_alone(routed: tuple[Pair, str], name: str) -> None:
    pair, router = routed
    path, body = REFUSED[name]
    alone, through = send(pair.decode.url, path, body), send(router, path, body)
    assert 400 <= alone[0] < 500
    assert through[0] == alone[0]
    assert json.loads(through[2])["error"]


def test_a_forced_tool_call_is_the_same(routed: tuple[Pair, str]) -> None:
    """A model of random weights may not end its call in time: then the refusal is the same."""
    pair, router = routed
    body = TALK | {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 30, "ignore_eos": False}
    alone, through = send(pair.decode.url, CHAT, body), send(router, CHAT, body)
    assert through[0] == alone[0], through[2]
    assert called(through[2]) == called(alone[2])


def called(raw: bytes) -> list[Any]:
    """The calls of an answer, without their ids; none in a refusal."""
    choices = json.loads(raw).get("choices", [])
    return [call["function"] for choice in choices for call in choice["message"]["tool_calls"]]


def test_caches_really_move(routed: tuple[Pair, str]) -> None:
    """By vLLM's own count: all of the above would hold for a router that skips prefill, too."""
    pair, router = routed
    name = "vllm:external_prefix_cache_hits_total"
    before = metric(pair.decode.url, name)
    body = COMPLETION | {"cache_salt": "moves"}
    status, headers, raw = send(router, COMPLETIONS, body)
    assert (status, headers["x-kvferry-path"]) == (200, "disaggregated")
    assert metric(pair.decode.url, name) - before >= json.loads(raw)["usage"]["prompt_tokens"] - 16
