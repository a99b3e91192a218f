"""JSON of which the router reads what it knows, whoever has written it: pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Value = TypeVar("Value")


def decoded(body: bytes, kind: type[Value]) -> Value | None:
    """The decoded body; None if it is not JSON, or not of this kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
