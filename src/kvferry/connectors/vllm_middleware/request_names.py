"""Which requests are for prefill or for decode alone, and what vLLM calls them."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import msgspec

RESPONSES = "/v1/responses"
# How vLLM makes a request's name of the caller's id, and of the prompt's number. A response calls the engine once more
# for each tool that the engine runs, and only the first call is for what was prefilled.
_NAMES = {
    "/v1/completions": "cmpl-{}-{}",
    "/v1/chat/completions": "chatcmpl-{}",
    "/v1/messages": "chatcmpl-{}",
    RESPONSES: "{}_0",
}
MAX_PROMPTS = 256
"""The names of no more prompts than these are known."""
ANSWER_PATHS = frozenset(_NAMES)
DECODE_MARK, PREFILL_MARK = b"do_remote_prefill", b"do_remote_decode"


@dataclass(frozen=True, slots=True)
class RequestNames:
    """vLLM's names of a prefill or a decode request, one per prompt. There are none for any other, and where vLLM makes
    up the name. `is_local` says that no other engine is asked for a cache; it is false where that is not known."""

    prefill_names: tuple[str, ...] = ()
    decode_names: tuple[str, ...] = ()
    is_local: bool = False


class _Params(msgspec.Struct):
    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class _Body(msgspec.Struct):
    """The fields that matter here; vLLM judges the rest."""

    kv_transfer_params: _Params | None = None
    request_id: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()


def names_of(path: str, header_id: str | None, body: bytes) -> RequestNames:
    """What a request is. Of an empty body nothing is known: it was too large.

    `header_id` is the caller's `X-Request-Id`, which goes before the body's `request_id`; of a response only the latter
    counts (`named`).
    """
    if DECODE_MARK not in body and PREFILL_MARK not in body:
        return RequestNames(is_local=bool(body))
    try:
        asked = msgspec.json.decode(body, type=_Body)
        num_prompts = _num_prompts(bytes(asked.prompt))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RequestNames(is_local=DECODE_MARK not in body)
    params = asked.kv_transfer_params or _Params()
    given = asked.request_id if header_id is None or path == RESPONSES else header_id
    numbers = range(0 if given is None else num_prompts)
    names = tuple(_NAMES[path].format(given, number) for number in numbers)
    return RequestNames(
        prefill_names=names if params.do_remote_decode else (),
        decode_names=names if params.do_remote_prefill else (),
        is_local=not params.do_remote_prefill,
    )


def named(path: str, header_id: str | None, body: bytes) -> bytes:
    """The body of a response to a request for another engine with a `request_id` of the caller's id, if it has none:
    vLLM would make one up, and nobody would know what it calls the request."""
    is_asked = path == RESPONSES and header_id is not None and (DECODE_MARK in body or PREFILL_MARK in body)
    if not is_asked:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if "request_id" in fields:
        return body
    # It names the response for others as well: it must be one that nobody has, nor guesses.
    return msgspec.json.encode({**fields, "request_id": f"resp_{header_id}_{uuid4().hex}"})


def _num_prompts(prompt: bytes) -> int:
    """How many prompts the field `prompt` has: texts or lists of tokens. What is nothing of that is one."""
    if not prompt.startswith(b"[") or prompt[1:].lstrip()[:1] not in (b'"', b"["):
        return 1
    return min(len(msgspec.json.decode(prompt, type=list[msgspec.Raw])), MAX_PROMPTS)
