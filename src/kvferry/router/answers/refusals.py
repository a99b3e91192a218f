"""What clients are told when there is no answer of an engine to pass on: pure."""

from __future__ import annotations

from typing import Any

from kvferry.http.openai import INVALID_REQUEST, SERVER_ERROR, error_body
from kvferry.router.commands import Cut, EndWithError, Refuse
from kvferry.router.events import PREFILL_FAILS, TOO_LATE, Failed
from kvferry.router.policy.records import Overloaded

PREFILL_UNAVAILABLE = "prefill_unavailable"
RETRY_AFTER_S = 5
# Reasons to skip prefill that mean that no prefill instance can do it. Any other reason is what the operator wants,
# such as a threshold.
FOR_WANT_OF_PREFILL = frozenset((PREFILL_FAILS, "ttft"))


def refusal(status: int, code: str, message: str, reason: str, retry_after_s: int = 0) -> Refuse:
    """The refusal for a failure of the service. `reason` is the label of the counter that it moves."""
    return Refuse(status, refusal_body(code, message, reason, SERVER_ERROR), retry_after_s)


def refusal_body(code: str, message: str, reason: str, type_: str) -> dict[str, Any]:
    body = error_body(message, type_, code, None)
    body["error"]["reason"] = reason
    return body


def no_decode_instance() -> Refuse:
    message = "no decode instance is healthy; hint: the router's log and its /kvferry/members say why"
    return refusal(503, "no_decode_instance", message, "no_decode_instance")


def no_prefill_instance(reason: str) -> Refuse:
    """The refusal where no prefill instance is left, and decode instances may not, or cannot, compute prompts."""
    message = (
        "no prefill instance can compute this prompt now, and no decode instance may, or can, compute it;"
        f" hint: try again in {RETRY_AFTER_S} s"
    )
    return refusal(503, PREFILL_UNAVAILABLE, message, reason, RETRY_AFTER_S)


def undivided(reason: str) -> Refuse:
    """The refusal of a request that one prefill cannot stand for, where no decode instance computes prompts."""
    message = (
        "the engines of this service answer only what one prefill request can stand for, and this request is not"
        f" ({reason}); hint: ask for one answer to one prompt, without logits of the prompt"
    )
    return Refuse(400, refusal_body("cannot_be_divided", message, reason, INVALID_REQUEST))


def overloaded(event: Overloaded) -> Refuse:
    message = f"the service is overloaded; hint: retry in {event.retry_after_s} s"
    body = refusal_body("overloaded", message, event.reason, "rate_limit_error")
    return Refuse(429, body, event.retry_after_s)


def too_late(event: Failed) -> Refuse:
    return refusal(504, "deadline_exceeded", f"there is no answer: {event.detail}", event.reason)


def decode_failed(event: Failed) -> Refuse:
    status, code = (504, "upstream_timeout") if event.reason == "deadline" else (502, "upstream_unavailable")
    return refusal(status, code, f"the decode instance did not answer: {event.detail}", event.reason)


def pair_failed(status: int) -> Refuse:
    """The refusal where a decode instance has answered with an error, and cannot serve the request by itself."""
    message = (
        f"a prefill and a decode instance could not serve this request together: decode answered with {status};"
        " hint: their logs say why"
    )
    return refusal(status, "pair_failed", message, f"status_{status}")


def prefill_lost(event: Failed) -> Refuse:
    return refusal(502, "prefill_failed", f"the cache did not arrive: {event.detail}", event.reason)


def broken_off(event: Failed, can_append: bool) -> Refuse | EndWithError | Cut:
    """The end of an answer that has begun. `can_append`: a frame may follow what the client has of it."""
    if event.is_withheld:
        return too_late(event) if event.reason == TOO_LATE else decode_failed(event)
    if event.is_told:
        return Cut()
    code = "deadline_exceeded" if event.reason == TOO_LATE else "upstream_broke_off"
    return EndWithError(f"the answer was interrupted: {event.detail}", code, event.reason) if can_append else Cut()
