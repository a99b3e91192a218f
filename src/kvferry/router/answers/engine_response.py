"""What the flow reads in the answers of engines: pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.http.openai import SERVER_ERROR, error_body
from kvferry.http.request_fields import DecodeOnlyReason
from kvferry.router.request.lenient_json import decoded
from kvferry.wire.messages import Reason

REASONS = frozenset((*Reason, *DecodeOnlyReason))
UNKNOWN_ERROR = "the engine could not answer"
CACHE, CACHE_REASON = b"x-kvferry-cache", b"x-kvferry-cache-reason"


class PrefillAnswer(msgspec.Struct):
    """The one field of a prefill instance's answer that matters here, as the bytes that came."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class ErrorCode(msgspec.Struct):
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct):
    """What an engine says went wrong; `code` is the reason of a transfer that failed, if one did."""

    error: ErrorCode


class FerryParams(msgspec.Struct):
    """`kv_transfer_params` of an engine that can be told to release them: those of kvferry."""

    kvferry: msgspec.Raw


def kept_cache(body: bytes) -> bytes:
    """`kv_transfer_params` of a prefill answer as it came: `null` if there is none, empty if it is no answer."""
    found = decoded(body, PrefillAnswer)
    return bytes(found.kv_transfer_params) if found else b""


def is_recomputed(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a decode engine says that it has computed a prompt whose cache did not come."""
    return any(name.lower() == CACHE and value == b"recomputed" for name, value in headers)


def known_reason(word: str) -> str:
    """An engine's word for why a cache did not come, as a label: there is a bounded number of those."""
    return word if word in REASONS else "unknown"


def lost_cache(body: bytes) -> str:
    """The reason why a cache did not arrive, if that is what the error object of an engine is about; else empty."""
    found = decoded(body, ErrorAnswer)
    code = found.error.code if found else None
    return code if isinstance(code, str) and code in frozenset(Reason) else ""


def event_data(event: bytes) -> bytes:
    """What one event says: the rest of its line of data, which may come after its name; empty for anything else."""
    line = event.partition(b"\n")[2] if event.startswith(b"event:") else event
    return line.removeprefix(b"data:") if line.startswith(b"data:") else b""


def streamed_error(piece: bytes) -> int:
    """The status that an event stream would have had that begins with an error event; 0 for any other beginning."""
    event, end, _ = piece.partition(b"\n\n")
    found = decoded(event_data(event), ErrorAnswer) if end else None
    if found is None:
        return 0
    code = found.error.code
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def error_answer(data: bytes) -> bytes:
    """The body of an answer in one piece that says what the data of an error event says. Only OpenAI's responses put
    that elsewhere than into an error object: into that of the response, or into the fields of the event itself."""
    found = decoded(data, dict) or {}
    if isinstance(found.get("error"), dict):
        return data
    response = found.get("response")
    told = response.get("error") if isinstance(response, dict) else found
    is_told = isinstance(told, dict) and told
    return msgspec.json.encode({"error": told} if is_told else error_body(UNKNOWN_ERROR, SERVER_ERROR, None, None))


def promised_cache(piece: bytes) -> bytes:
    """`kv_transfer_params` of the first event of a prefill stream, as they came; empty if there are none."""
    event, end, _ = piece.partition(b"\n\n")
    promised = kept_cache(event_data(event)) if end else b""
    return promised if promised.startswith(b"{") else b""


def stream_failure(body: bytes) -> bytes:
    """The data of the error event in an event stream that was read to its end; empty if it has none."""
    return next((event_data(event).strip() for event in body.split(b"\n\n") if streamed_error(event + b"\n\n")), b"")


def can_be_released(transfer: bytes) -> bool:
    """Whether these `kv_transfer_params` are of an engine that can be told to let go: one of kvferry's."""
    return decoded(transfer, FerryParams) is not None
