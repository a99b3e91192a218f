"""Reads one streamed answer: times of its pieces, token counts, errors. Pure: the caller passes the time."""

from __future__ import annotations

from typing import Any

import msgspec

DATA, DONE = b"data:", b"[DONE]"
# Of an error that a server tells.
MAX_WORDS = 400
# What the parts of a chat answer may consist of.
CONTENTS = ("content", "reasoning", "reasoning_content", "tool_calls")


class Answer:
    """Takes the bytes of a stream of server-sent events, in pieces of any size.

    `piece_times` are the times at which tokens came, with text or without: special ones, and halves of characters, have
    none. `output_tokens` is what `usage` says or -1, `prompt_tokens` likewise. `error` is what the server said was
    wrong with it, empty if nothing was.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.piece_times: list[float] = []
        self.output_tokens = self.prompt_tokens = -1
        self.error = ""
        self.is_done = False

    def end(self, now: float) -> None:
        """Nothing follows. The last line need not have an end."""
        self.push(b"\n", now)

    def push(self, data: bytes, now: float) -> None:
        """Take what has come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                self._event(line[len(DATA) :].strip(), now)

    @property
    def wrong(self) -> str:
        """Why the answer is not whole, if it ends here; empty when it is."""
        if self.error:
            return self.error
        if not self.is_done:
            return "the stream ended without [DONE]"
        return "" if self.piece_times else "the answer has no tokens"

    def _event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_done = True
            return
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            self.error = "an event is not a JSON object"
            return
        if event.get("error") is not None:
            self.error = message_of(event)
        if isinstance(usage := event.get("usage"), dict):
            self.output_tokens = _count(usage, "completion_tokens")
            self.prompt_tokens = _count(usage, "prompt_tokens")
        choices = event.get("choices")
        if isinstance(choices, list) and any(_has_token(choice) for choice in choices):
            self.piece_times.append(now)


def message_of(body: dict[str, Any]) -> str:
    """The words of an error object, of OpenAI's shape or another."""
    error = body.get("error")
    words = error.get("message") if isinstance(error, dict) else error
    found = str(words or body.get("message") or body.get("detail") or "an error without a message")
    return found if len(found) <= MAX_WORDS else f"{found[:MAX_WORDS]} ..."


def refusal(status: int, body: bytes) -> str:
    """The words of a response that is no answer."""
    try:
        words = message_of(msgspec.json.decode(body, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        words = body[:100].decode(errors="replace")
    return f"HTTP {status}: {words}".rstrip(": ")


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value >= 0 else -1


def _has_token(choice: object) -> bool:
    """Not of a chat's first event, which says who speaks, nor of a last one that only says why it has ended."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "text" in choice
    has_text = any(delta.get(name) for name in CONTENTS)
    return has_text or (not delta.get("role") and any(delta.get(name) is not None for name in CONTENTS))
