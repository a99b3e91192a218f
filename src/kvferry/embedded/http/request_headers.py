"""Who sends a request and what they want to be told, by its headers: pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import RequestError
from kvferry.http.openai import REPORT_HEADER
from kvferry.http.request_ids import is_usable

YES_OR_NO = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` goes into references and logs. With `wants_report` the answer has the object `kvferry`."""

    request_id: str
    wants_report: bool = False


def caller_of(headers: Mapping[str, str]) -> Caller:
    """Of headers whose names are looked up in lower case. Raises RequestError."""
    return Caller(_request_id(headers.get("x-request-id")), _wants_report(headers.get(REPORT_HEADER)))


def _request_id(given: str | None) -> str:
    """The caller's id, or a new one."""
    if given is None:
        return uuid.uuid4().hex
    if not is_usable(given):
        raise RequestError(
            "x-request-id cannot be used",
            found=given[:200],
            expected="at most 128 letters, digits and . _ - + = /",
            hint="omit the header to get a generated id",
        )
    return given


def _wants_report(given: str | None) -> bool:
    """A value that is neither is refused: who sends it would look for an object that does not come."""
    wanted = False if given is None else YES_OR_NO.get(given.strip().lower())
    if wanted is None:
        raise RequestError(
            f"{REPORT_HEADER} cannot be understood",
            found=(given or "")[:200],
            expected="true or false",
            hint="leave the header out for an answer without a report",
        )
    return wanted
