"""The shared OpenAI error objects and SSE frames."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import (
    BlockTableError,
    ConfigurationError,
    IllegalEventError,
    PromptTooLongError,
    RequestError,
    TransferError,
    WireError,
)
from kvferry.http.openai import error_body, error_event, error_of, sse


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("too long"), 400, "context_length_exceeded"),
        (ConfigurationError("bad"), 400, "invalid_configuration"),
        (RequestError("bad"), 400, "invalid_request"),
        (BlockTableError("bad"), 400, "invalid_request"),
        (TransferError("expired", "lost"), 502, "expired"),
        (WireError("bad frame"), 500, "internal_error"),
        (IllegalEventError("defect"), 500, "internal_error"),
    ],
)
def test_status_and_code_of_each_error(error, status, code):
    found_status, body = error_of(error)
    assert found_status == status
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_a_callers_mistake_carries_found_expected_and_hint():
    _, body = error_of(RequestError("no prompt", found="nothing", expected="text", hint="send one"))
    for words in ("found: nothing", "expected: text", "hint: send one"):
        assert words in body["error"]["message"]


def test_a_defect_of_ours_keeps_its_details_to_itself():
    _, body = error_of(IllegalEventError("a defect", found="history of the request"))
    assert "history" not in body["error"]["message"]


def test_sse_frame_is_one_event_without_a_name():
    frame = sse(error_body("größer", "server_error", None, None))
    assert frame.startswith(b"data: {")
    assert frame.endswith(b"}\n\n")
    assert frame.count(b"\n") == 2
    assert json.loads(frame[6:])["error"]["message"] == "größer"


def test_error_event_is_an_error_object():
    assert json.loads(error_event("broke", "upstream")[6:])["error"]["code"] == "upstream"
