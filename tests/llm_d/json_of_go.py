"""JSON as Go's `encoding/json` writes what it has read as a map of anything: numbers are doubles, keys are sorted."""

from __future__ import annotations

import json
from typing import Any, NoReturn

# From here on Go writes a double with an exponent.
EXPONENT_FROM = 1e21


def loads(text: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no object of JSON."""
    document = json.loads(text, parse_int=_double, parse_float=_double, parse_constant=_refused)
    if not isinstance(document, dict):
        raise ValueError(f"json: cannot unmarshal a {type(document).__name__} into a map")
    return document


def dumps(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _double(digits: str) -> int | float:
    """Integers above 2^53 lose their last digits; what has no fraction is written without one."""
    number = float(digits)
    return int(number) if number.is_integer() and abs(number) < EXPONENT_FROM else number


def _refused(name: str) -> NoReturn:
    raise ValueError(f"invalid character in {name}")
