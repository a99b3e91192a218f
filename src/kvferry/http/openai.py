"""What the router and the embedded engine share of the OpenAI HTTP dialect: error objects and SSE frames.

No web framework: a caller turns `(status, body)` into a response of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.errors import ConfigurationError, FerryError, PromptTooLongError, RequestError, TransferError
from kvferry.wire.messages import Reason

# The header by which a request asks for the object `kvferry` in its answer.
REPORT_HEADER = "x-kvferry-report"

SSE_MEDIA_TYPE = "text/event-stream"
SSE_DONE = b"data: [DONE]\n\n"
OPENING_EVENTS = tuple(b"event: response.%b\n" % name for name in (b"created", b"in_progress", b"queued"))
"""How events of a response begin that say only that it has begun: engines send them before the first token."""

HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}
"""What programs know refusals by that come before a request is understood."""
INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


LOST_CACHE = {
    Reason.MALFORMED: "invalid kv_transfer_params",
    Reason.WIRE_VERSION: "the two engines run incompatible releases",
    Reason.WRONG_ENGINE: "kv_transfer_params belong to another engine",
    Reason.WRONG_EPOCH: "the prefill engine has been restarted",
    Reason.WRONG_PROMPT: "kv_transfer_params belong to another prompt",
    Reason.UNNAMED_PROMPT: "engines cannot compare what this prompt depends on",
    Reason.UNKNOWN_LEASE: "the prefill engine does not know this request",
    Reason.EXPIRED: "the prefill engine has already freed this cache",
    Reason.OUT_OF_RANGE: "the prefill engine does not keep all that this prompt needs of its cache",
    Reason.NOT_CLAIMED: "the prefill engine does not know this reader",
    Reason.ALREADY_CLAIMED: "kv_transfer_params are in use by another request",
    Reason.INCOMPATIBLE: "the two engines do not hold the same cache",
    Reason.UNREACHABLE: "the two engines have no working transport between them",
    Reason.PEER_LOST: "the prefill engine has stopped responding",
    Reason.DEADLINE: "the prefill engine did not answer in time, or the transfer took too long",
    Reason.TRANSPORT: "the transfer failed",
    Reason.ABORTED: "the transfer was cancelled",
    Reason.DIGEST: "the received cache differs from the one that was sent",
}
"""What clients are told of a cache that did not arrive; the engine's log has the rest."""


def lost_cache_words(reason: str) -> str:
    """What a client is told of a cache that did not arrive. `reason` need not be one of those that peers give."""
    why = {str(known): words for known, words in LOST_CACHE.items()}.get(reason, "this engine cannot receive one")
    return f"the prompt's cache did not arrive: {why}; hint: the engine's log has the details"


def error_body(message: str, type_: str, code: str | None, param: str | None) -> dict[str, Any]:
    """An OpenAI error object. `code` is a stable label for programs, `param` the field that is at fault."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def error_of(error: FerryError) -> tuple[int, dict[str, Any]]:
    """HTTP status and error object of one of our errors.

    An error that the caller can mend is told in full. For a server's defect only what went wrong is told, since
    its found/expected/hint are for the operator. So are the details of a failed transfer: they name
    internal engines and addresses.
    """
    match error:
        case PromptTooLongError():
            return 400, error_body(str(error), INVALID_REQUEST, "context_length_exceeded", error.param or None)
        case TransferError():
            return 502, error_body(lost_cache_words(error.reason), SERVER_ERROR, error.reason, None)
        case RequestError():
            return 400, error_body(str(error), INVALID_REQUEST, "invalid_request", error.param or None)
        case ConfigurationError():
            return 400, error_body(str(error), INVALID_REQUEST, "invalid_configuration", None)
        case _:
            return 500, error_body(error.what, SERVER_ERROR, "internal_error", None)


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event without an event name: `data: {...}` and a blank line, UTF-8."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(message: str, code: str | None, reason: str = "") -> bytes:
    """The last frame of a broken stream. No `[DONE]` follows it, so nobody takes half for whole."""
    return sse(stream_error(message, code, reason))


def stream_error(message: str, code: str | None, reason: str = "") -> dict[str, Any]:
    """The error object that ends a stream. `reason` labels the counter that moved, if there is one besides `code`."""
    body = error_body(message, SERVER_ERROR, code, None)
    if reason:
        body["error"]["reason"] = reason
    return body


def least_prompts(prompt: bytes) -> int:
    """How many prompts there are at least in the JSON of a field `prompt`. None is built: a million take seconds."""
    items = prompt.lstrip()
    if not items.startswith(b"["):
        return 1
    # Where the first is no text, a bracket begins a list of tokens.
    return least_texts(items) if items[1:].lstrip().startswith(b'"') else max(1, items.count(b"[") - 1)


def least_texts(items: bytes) -> int:
    """How many texts there are at least in a list in JSON: a quote within one has a backslash before it."""
    return (items.count(b'"') - items.count(b'\\"')) // 2
