"""What an answer says about cached tokens: the figure of the prefill engine, in place of the decode engine's. Pure.

A decode engine counts what was transferred to it as cached; a client wants to know what did not have to be computed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.router.request.lenient_json import decoded

DETAILS, CACHED = "prompt_tokens_details", "cached_tokens"
# What an event, or a body, has that may have to be changed; inside a text the quotation marks would be escaped.
MARK = b'"prompt_tokens"'
# An event that is longer passes as it is.
MAX_EVENT_BYTES = 1 << 16
UNKNOWN = None
END_OF_EVENT = b"\n\n"


class UsageAndChoices(msgspec.Struct):
    """What is looked at of an answer, or of an event, as the bytes that came."""

    usage: msgspec.Raw = msgspec.Raw(b"")
    choices: msgspec.Raw = msgspec.Raw(b"[]")


def cached_tokens_of(body: bytes) -> int | None:
    """What a prefill engine had cached of the prompt, from its whole answer or one event; None if it does not tell."""
    if DETAILS.encode() not in body:
        return UNKNOWN
    usage = _fields(_usage_of(body))
    details = usage.get(DETAILS)
    cached = details.get(CACHED) if isinstance(details, dict) else None
    return cached if isinstance(cached, int) and not isinstance(cached, bool) and cached >= 0 else UNKNOWN


def cached_tokens_of_stream(events: bytes) -> int | None:
    """The same of a whole stream of them."""
    found = (cached_tokens_of(event.removeprefix(b"data:")) for event in reversed(events.split(END_OF_EVENT)))
    return next((cached for cached in found if cached is not UNKNOWN), UNKNOWN)


def with_cached_tokens(body: bytes, cached: int | None) -> bytes:
    """A JSON object whose usage has this figure, or none where it is not known. All else stays as it is."""
    if MARK not in body:
        return body
    found = _usage_of(body)
    usage = _fields(found)
    if not usage or (cached is UNKNOWN and usage.get(DETAILS) is None):
        return body
    details = usage.get(DETAILS)
    others = details if isinstance(details, dict) else {}
    usage[DETAILS] = None if cached is UNKNOWN else {**others, CACHED: cached}
    # It is the last of an object's fields as a rule, and no string can hold it: its quotation marks would be escaped.
    before, _, after = body.rpartition(found)
    return before + msgspec.json.encode(usage) + after


def tells_usage(body: bytes | bytearray) -> bool:
    """Whether a body, or events, may have a usage whose figure is to be changed."""
    return MARK in body


def before_final_usage(events: bytes) -> int:
    """How many bytes of these whole events come before the one that has the usage of a stream and no token; all of them
    if there is none. A usage that comes with each token is not the final one."""
    at = 0
    for event in events.split(END_OF_EVENT):
        if MARK in event and _has_no_choices(event.removeprefix(b"data:")):
            return at
        at += len(event) + len(END_OF_EVENT)
    return len(events)


def with_cached_tokens_in_events(events: bytes, cached: int | None) -> bytes:
    """The same as `with_cached_tokens` for each of these whole events."""
    return END_OF_EVENT.join(
        _changed_event(part, cached) if MARK in part else part for part in events.split(END_OF_EVENT)
    )


class UsageEvents:
    """Of one stream: bytes as they come go in, whole events come out."""

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on now."""
        data = self._waiting + piece if self._waiting else piece
        end = data.rfind(END_OF_EVENT)
        # Servers that end lines in another way are left alone.
        is_other = len(data) > MAX_EVENT_BYTES or b"\r\n\r\n" in data
        end = end + len(END_OF_EVENT) if end >= 0 else len(data) if is_other else 0
        whole, self._waiting = data[:end], data[end:]
        return whole

    def rest(self) -> bytes:
        """What is no whole event at the end of the stream."""
        rest, self._waiting = self._waiting, b""
        return rest


def _changed_event(event: bytes, cached: int | None) -> bytes:
    if not event.startswith(b"data:"):
        return event
    return b"data:" + with_cached_tokens(event.removeprefix(b"data:"), cached)


def _has_no_choices(body: bytes) -> bool:
    found = decoded(body, UsageAndChoices)
    return found is not None and bytes(found.choices).strip() in (b"[]", b"null")


def _usage_of(body: bytes) -> bytes:
    """The bytes of an object's usage; empty if it has none."""
    found = decoded(body, UsageAndChoices)
    return bytes(found.usage) if found else b""


def _fields(usage: bytes) -> dict[str, Any]:
    return decoded(usage, dict) or {}
