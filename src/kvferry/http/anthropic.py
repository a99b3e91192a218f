"""Errors as clients of Anthropic's Messages API read them, made of OpenAI's: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.http.openai import SERVER_ERROR, error_event, sse, stream_error
from kvferry.http.request_fields import Endpoint

TYPES = {
    "invalid_api_key": "authentication_error",
    "not_found": "not_found_error",
    "request_too_large": "request_too_large",
    SERVER_ERROR: "api_error",
}
"""Anthropic's type of an error by kvferry's code, or else by OpenAI's type, where the two APIs differ."""


def error_for(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error body of OpenAI's, as whoever asks for this path expects it. All that it says stays in it."""
    if not _is_anthropic(path) or "error" not in body:
        return body
    error = body["error"]
    type_ = TYPES.get(error["code"]) or TYPES.get(error["type"], error["type"])
    return {"type": "error", **body, "error": {**error, "type": type_}}


def error_event_for(path: str, message: str, code: str | None, reason: str = "") -> bytes:
    """The last frame of a broken stream: Anthropic's clients look at the names of events."""
    if not _is_anthropic(path):
        return error_event(message, code, reason)
    return b"event: error\n" + sse(dict(error_for(path, stream_error(message, code, reason))))


def _is_anthropic(path: str) -> bool:
    return path == Endpoint.MESSAGES or path.startswith(f"{Endpoint.MESSAGES}/")
