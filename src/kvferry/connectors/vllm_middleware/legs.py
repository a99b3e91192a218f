"""Which requests are prefill or decode legs, and what vLLM calls them: pure."""

from __future__ import annotations

import msgspec

# How vLLM's two OpenAI endpoints make a request's name of the caller's id: that of the first of several prompts.
_NAMES = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}
ANSWER_PATHS = frozenset(_NAMES)
MARK, PREFILL_MARK = b"do_remote_prefill", b"do_remote_decode"


class _Params(msgspec.Struct):
    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class _Body(msgspec.Struct):
    """The fields that matter here; vLLM judges the rest."""

    kv_transfer_params: _Params | None = None
    request_id: str | None = None


def is_local(body: bytes) -> bool:
    """Whether no other engine is asked for a cache; false where that is not known: an empty body was too large."""
    if MARK not in body:
        return bool(body)
    return any(not _is_decode_leg(asked) for asked in _read(body))


def leg_name(path: str, header_id: str | None, body: bytes) -> str:
    """vLLM's name for a decode leg; empty for any other request, and for one whose name vLLM makes up.

    `header_id` is the caller's `X-Request-Id`, which goes before the body's `request_id`.
    """
    for asked in filter(_is_decode_leg, _read(body) if MARK in body else ()):
        return _name(path, header_id, asked)
    return ""


def prefill_name(path: str, header_id: str | None, body: bytes) -> str:
    """The same of a prefill leg."""
    for asked in _read(body) if PREFILL_MARK in body else ():
        params = asked.kv_transfer_params
        return _name(path, header_id, asked) if params is not None and params.do_remote_decode else ""
    return ""


def _name(path: str, header_id: str | None, asked: _Body) -> str:
    given = asked.request_id if header_id is None else header_id
    return _NAMES[path].format(given) if given is not None else ""


def _read(body: bytes) -> tuple[_Body, ...]:
    """What a body says, if that can be understood."""
    try:
        return (msgspec.json.decode(body, type=_Body),)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def _is_decode_leg(asked: _Body) -> bool:
    return asked.kv_transfer_params is not None and asked.kv_transfer_params.do_remote_prefill
