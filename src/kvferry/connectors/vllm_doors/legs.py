"""Which requests are legs of a disaggregated one, and what vLLM calls them: pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

__all__ = ["ANSWER_PATHS", "NO_LEG", "Leg", "leg_of", "names_of"]

# How vLLM's two OpenAI endpoints make a request's name of the caller's id: that of the first of several prompts.
_NAMES = {"/v1/completions": "cmpl-{}-0", "/v1/chat/completions": "chatcmpl-{}"}
ANSWER_PATHS = frozenset(_NAMES)
RANDOM_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg by vLLM's name for it; without a name it is none, or one whose name vLLM makes up."""

    name: str = ""
    is_decode: bool = False


NO_LEG = Leg()


class _Params(msgspec.Struct):
    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class _Body(msgspec.Struct):
    """The fields that matter here; vLLM judges the rest."""

    kv_transfer_params: _Params | None = None
    request_id: str | None = None


def leg_of(path: str, header_id: str | None, body: bytes) -> Leg:
    """What a request is. `header_id` is the caller's `X-Request-Id`, which goes before the body's `request_id`."""
    if b"do_remote_" not in body:
        return NO_LEG
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_LEG
    params = asked.kv_transfer_params or _Params()
    given = asked.request_id if header_id is None else header_id
    if given is None or not (params.do_remote_prefill or params.do_remote_decode):
        return NO_LEG
    return Leg(_NAMES[path].format(given), params.do_remote_prefill)


def names_of(request_id: str) -> Iterator[str]:
    """What vLLM was asked to call a request: it adds random characters, unless it is told not to."""
    yield request_id
    name, dash, end = request_id.rpartition("-")
    if dash and len(end) == RANDOM_CHARACTERS:
        yield name
