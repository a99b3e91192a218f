"""How the answers of each API look: what they say about cached tokens, where the figure of the prefill engine takes the
place of the decode engine's, and with what they begin before there is a token. Pure.

A decode engine counts what was transferred to it as cached; a client wants to know what did not have to be computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvferry.http.openai import OPENING_EVENTS
from kvferry.http.request_fields import Endpoint
from kvferry.router.answers.engine_response import error_answer, event_data, streamed_error
from kvferry.router.request.lenient_json import decoded

CACHED = "cached_tokens"
INPUT, CACHE_READ = "input_tokens", "cache_read_input_tokens"
# An event that is longer passes as it is.
MAX_EVENT_BYTES = 1 << 16
UNKNOWN = None
END_OF_EVENT = b"\n\n"
# Every event that tells of an error has these bytes, and no text can hold them: its quotation marks are escaped.
ERROR = b'"error"'
# The blank line after the last event, with either kind of line end. What follows it does not matter.
END_OF_STREAM = re.compile(rb"\n\r?\n")
# Longer than the line with which any last event begins.
MAX_LINE_BYTES = 64


class UsageHolder(msgspec.Struct):
    """The fields of an answer, or of an event, that are looked at, as the bytes that came."""

    usage: msgspec.Raw = msgspec.Raw(b"")
    choices: msgspec.Raw = msgspec.Raw(b"[]")
    type: msgspec.Raw = msgspec.Raw(b"")
    response: msgspec.Raw = msgspec.Raw(b"")
    message: msgspec.Raw = msgspec.Raw(b"")


Usage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one API tells what was cached, and what goes before a token.

    Only an event, or a body, with the bytes `mark` may have to be changed. No text can hold these, since its quotation
    marks are escaped. Without the bytes `told` there is no figure. `read` takes the figure out of a usage, and `write`
    puts another one into it, or removes it if that is None. `is_final` says whether an event with a usage is the one
    without a token. An event may be as long as `max_event_bytes`. Events named in `opening` say only that an answer has
    begun, and those in `failing` that there will be none. An event whose first line matches `ending` is the last that
    a client of a stream needs.
    """

    mark: bytes
    told: bytes
    read: Callable[[Usage], object]
    write: Callable[[Usage, int | None], Usage]
    is_final: Callable[[UsageHolder], bool]
    max_event_bytes: int = MAX_EVENT_BYTES
    opening: tuple[bytes, ...] = ()
    failing: tuple[bytes, ...] = ()
    ending: re.Pattern[bytes] = re.compile(rb"\ndata: ?\[DONE\]\r?\n")

    def opening_bytes(self, events: bytes) -> int:
        """How many of these bytes are events that say only that an answer has begun, or may become such events."""
        if not self.opening:
            return 0
        *whole, rest = events.split(END_OF_EVENT)
        at = 0
        for event in whole:
            if not event.startswith(self.opening):
                return at
            at += len(event) + len(END_OF_EVENT)
        may_open = rest.startswith(self.opening) or any(name.startswith(rest) for name in self.opening)
        return len(events) if may_open else at

    def failed_at_once(self, events: bytes) -> int:
        """The status that an event stream would have had that fails before its first token; 0 for any other."""
        rest = events[self.opening_bytes(events) :]
        return streamed_error(rest) or (500 if self.failing and rest.startswith(self.failing) else 0)

    def error_of(self, events: bytes) -> bytes:
        """What a stream says that has failed at once, as the body of an answer in one piece."""
        event, _, _ = events[self.opening_bytes(events) :].partition(END_OF_EVENT)
        return error_answer(event_data(event).strip())

    def failed_amid(self, events: bytes) -> int:
        """The status of the first of these whole events that says that an answer has failed, which is no refusal of
        the request; 0 if none does."""
        if ERROR not in events:
            return 0
        found = (self.failed_at_once(event + END_OF_EVENT) for event in events.split(END_OF_EVENT))
        return next((status for status in found if status >= 500), 0)

    def cached_tokens_of(self, body: bytes) -> int | None:
        """What a prefill engine had cached of the prompt, from its whole answer or one event; None if it does not
        tell."""
        if self.told not in body:
            return UNKNOWN
        cached = self.read(_fields(_usage_of(body)))
        return cached if isinstance(cached, int) and not isinstance(cached, bool) and cached >= 0 else UNKNOWN

    def cached_tokens_of_stream(self, events: bytes) -> int | None:
        """The same figure, from a whole stream of events."""
        found = (self.cached_tokens_of(event_data(event)) for event in reversed(events.split(END_OF_EVENT)))
        return next((cached for cached in found if cached is not UNKNOWN), UNKNOWN)

    def with_cached_tokens(self, body: bytes, cached: int | None) -> bytes:
        """A JSON object whose usage has this figure, or none where it is not known. All else stays as it is."""
        if not self.tells_usage(body):
            return body
        found = _usage_of(body)
        usage = _fields(found)
        if not usage or (cached is UNKNOWN and self.read(usage) is None):
            return body
        # The usage is the last field of an object as a rule, and no string can hold the same bytes: its quotation marks
        # would be escaped.
        before, _, after = body.rpartition(found)
        return before + msgspec.json.encode(self.write(usage, cached)) + after

    def tells_usage(self, body: bytes | bytearray) -> bool:
        """Whether a body, or events, may have a usage whose figure is to be changed."""
        return self.mark in body

    def before_final_usage(self, events: bytes) -> int:
        """How many bytes of these whole events come before the one that has the usage of a stream and no token; all of
        them if there is none. A usage that comes with each token is not the final one."""
        at = 0
        for event in events.split(END_OF_EVENT):
            if self.tells_usage(event) and self._is_final(event):
                return at
            at += len(event) + len(END_OF_EVENT)
        return len(events)

    def with_cached_tokens_in_events(self, events: bytes, cached: int | None) -> bytes:
        """The same as `with_cached_tokens` for each of these whole events."""
        return END_OF_EVENT.join(self._changed_event(part, cached) for part in events.split(END_OF_EVENT))

    def _changed_event(self, event: bytes, cached: int | None) -> bytes:
        data = event_data(event) if self.tells_usage(event) else b""
        return event.removesuffix(data) + self.with_cached_tokens(data, cached)

    def _is_final(self, event: bytes) -> bool:
        found = decoded(event_data(event), UsageHolder)
        return found is not None and self.is_final(found)


def _with_details(
    mark: bytes, name: str, is_final: Callable[[UsageHolder], bool], *, is_required: bool = False
) -> AnswerFormat:
    """OpenAI's format: the figure is a detail of the number of all tokens of the prompt. Where details are required, an
    unknown figure becomes 0."""

    def read(usage: Usage) -> object:
        details = usage.get(name)
        return details.get(CACHED) if isinstance(details, dict) else None

    def write(usage: Usage, cached: int | None) -> Usage:
        details = usage.get(name)
        others = details if isinstance(details, dict) else {}
        known = 0 if cached is UNKNOWN and is_required else cached
        return {**usage, name: None if known is UNKNOWN else {**others, CACHED: known}}

    return AnswerFormat(mark, b'"%b"' % name.encode(), read, write, is_final)


def _beside_cached(usage: Usage, cached: int | None) -> Usage:
    """The usage with the figure in Anthropic's format, where the tokens of the input do not include the cached ones."""
    counted, read = usage.get(INPUT), usage.get(CACHE_READ) or 0
    if not isinstance(counted, int) or not isinstance(read, int):
        return usage
    whole, others = counted + read, {name: value for name, value in usage.items() if name != CACHE_READ}
    if cached is UNKNOWN:
        return {**others, INPUT: whole}
    return {**others, INPUT: max(whole - cached, 0), CACHE_READ: min(cached, whole)}


CHAT = _with_details(
    b'"prompt_tokens"', "prompt_tokens_details", lambda found: bytes(found.choices).strip() in (b"[]", b"null")
)
RESPONSES = replace(
    _with_details(b'"input_tokens"', "input_tokens_details", lambda found: True, is_required=True),
    # The last event repeats the whole answer, with its instructions and tools.
    max_event_bytes=8 << 20,
    opening=OPENING_EVENTS,
    failing=(b"event: response.failed\n", b"event: error\n"),
    ending=re.compile(rb"\nevent: ?response\.(?:completed|incomplete)\r?\n"),
)
MESSAGES = AnswerFormat(
    mark=b'"input_tokens"',
    told=b'"cache_read_input_tokens"',
    read=lambda usage: usage.get(CACHE_READ),
    write=_beside_cached,
    is_final=lambda found: bytes(found.type) == b'"message_delta"',
    ending=re.compile(rb"\nevent: ?message_stop\r?\n"),
)
ANSWER_FORMATS: Mapping[Endpoint, AnswerFormat] = {
    Endpoint.COMPLETIONS: CHAT,
    Endpoint.CHAT: CHAT,
    Endpoint.RESPONSES: RESPONSES,
    Endpoint.MESSAGES: MESSAGES,
}


class StreamEnd:
    """Finds the end of a stream in the bytes that its client gets. When it `is_over` the client has all it needs."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._last_event, self._has_begun = answer_format.ending, False
        self._tail = b"\n"
        self.is_over = False

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. The stream is over at the blank line that ends its last event."""
        data = self._tail + piece
        if not self._has_begun and (found := self._last_event.search(data)):
            # The line end of that first line may also be the beginning of the blank line.
            self._has_begun, data = True, data[found.end() - 1 :]
        self._tail = data[-MAX_LINE_BYTES:]
        self.is_over = self.is_over or (self._has_begun and END_OF_STREAM.search(data) is not None)


class WholeEvents:
    """Cuts one stream into whole events: bytes go in as they come, whole events come out."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._waiting = bytearray()
        self._max_event_bytes = max_event_bytes

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes, and return what can be passed on now."""
        data, looked_at = self._waiting, max(0, len(self._waiting) - 3)
        data += piece
        end = data.rfind(END_OF_EVENT, looked_at)
        # Events that are too long, or that end lines in another way, pass as they are.
        is_other = len(data) > self._max_event_bytes or data.find(b"\r\n\r\n", looked_at) >= 0
        end = end + len(END_OF_EVENT) if end >= 0 else len(data) if is_other else 0
        whole, self._waiting = bytes(data[:end]), data[end:] if end else data
        return whole

    def rest(self) -> bytes:
        """Return the bytes after the last whole event, at the end of the stream."""
        rest, self._waiting = bytes(self._waiting), bytearray()
        return rest


def _usage_of(body: bytes) -> bytes:
    """The bytes of an object's usage, or of what an event of OpenAI's responses or Anthropic's messages is about; empty
    if it has none."""
    found = decoded(body, UsageHolder)
    if found is None or (usage := bytes(found.usage)):
        return usage if found else b""
    inner = decoded(bytes(found.response) or bytes(found.message), UsageHolder)
    return bytes(inner.usage) if inner else b""


def _fields(usage: bytes) -> dict[str, Any]:
    return decoded(usage, dict) or {}
