"""Prefill requests that are answered at once with a reference to what is going to be computed: pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Message

from kvferry import Reference
from kvferry.connectors.early_lease import Promise, new_promise, sealed
from kvferry.connectors.vllm_middleware.workers import EarlyFacts
from kvferry.errors import RequestError
from kvferry.http.openai import sse
from kvferry.kv_transfer_params import early_params, wants_early

_KINDS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion.chunk"}
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])


class EarlyPrefill:
    """One such request, as its client has sent it. `fields` are the top level of its body."""

    def __init__(self, path: str, fields: Mapping[str, msgspec.Raw], params: Mapping[str, Any]) -> None:
        self._kind = _KINDS[path]
        self._fields = fields
        self._params = params
        self._promise: Promise = new_promise()

    def body(self, facts: EarlyFacts) -> bytes:
        """What vLLM is to read: a promise in place of whatever the client has written there."""
        params = {**self._params, "kvferry": sealed(self._promise, facts.key)}
        return msgspec.json.encode({**self._fields, "kv_transfer_params": params})

    @property
    def name(self) -> str:
        """What the agents call it."""
        return self._promise.name

    def first_event(self, facts: EarlyFacts) -> Message:
        """What the caller hears as soon as vLLM computes for the request."""
        reference = Reference(facts.engine_id, facts.epoch, self._promise.name, self._promise.lease_id)
        event = {
            "id": self._promise.name,
            "object": self._kind,
            "created": int(time.time()),
            "model": _text(self._fields.get("model")),
            "choices": [],
            "kv_transfer_params": early_params(reference, facts.addresses),
        }
        return {"type": "http.response.body", "body": sse(event), "more_body": True}


def early_prefill(path: str, body: bytes) -> EarlyPrefill | None:
    """The early prefill that a request is; None for any other, and for what vLLM is to refuse.

    Raises RequestError for one that cannot be.
    """
    if b"do_remote_decode" not in body or b"early" not in body:
        return None
    try:
        fields = _TOP_LEVEL.decode(body)
        params = msgspec.json.decode(fields.get("kv_transfer_params", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(params, dict) or params.get("do_remote_decode") is not True or not wants_early(params):
        return None
    if path not in _KINDS:
        what = f"there is no early prefill of {path}"
        raise RequestError(what, found="early in kv_transfer_params", expected=f"a request to {' or '.join(_KINDS)}")
    _check(fields, params)
    return EarlyPrefill(path, fields, params)


def _check(fields: Mapping[str, msgspec.Raw], params: Mapping[str, Any]) -> None:
    """One reference stands for one sequence, and has to come before the answer."""
    if params.get("do_remote_prefill") is True:
        what = "kv_transfer_params asks for prefill and decode at once"
        raise RequestError(what, found="do_remote_decode and do_remote_prefill", expected="one of them")
    if bytes(fields.get("stream", b"")) != b"true":
        raise RequestError("an early prefill request must be streamed", found="no stream", hint="set stream to true")
    several = [name for name in ("n", "best_of") if bytes(fields.get(name, b"1")) not in (b"1", b"null")]
    several += [name for name in ("use_beam_search",) if bytes(fields.get(name, b"false")) not in (b"false", b"null")]
    prompts = {name: _num_prompts(fields[name]) for name in ("prompt", "prompt_embeds") if name in fields}
    several += [name for name, num in prompts.items() if num] if sum(prompts.values()) > 1 else []
    if several:
        what = "an early reference is for one sequence"
        raise RequestError(what, found=", ".join(several), expected="one prompt and one answer")


def _num_prompts(raw: msgspec.Raw) -> int:
    """Each one is a sequence of its own. A list of token ids is one, and what cannot be read is vLLM's to refuse."""
    try:
        prompt = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    are_several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if are_several else int(prompt is not None)


def _text(raw: msgspec.Raw | None) -> str:
    """A string's value; empty for anything else."""
    try:
        return msgspec.json.decode(raw or b'""', type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
