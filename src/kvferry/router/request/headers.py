"""Which headers pass the router, in both directions. Names are compared in lower case, as ASGI has them."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable

from kvferry.errors import RequestError
from kvferry.http.request_ids import NAME, is_usable

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# SGLang lets these take the place of fields of the body that only the router may set, or whose value (rid) may be known
# there since a try that failed.
SGLANG_OVERRIDES = frozenset(
    (
        b"x-data-parallel-rank",
        b"x-override-rid",
        b"x-override-bootstrap-host",
        b"x-override-bootstrap-port",
        b"x-override-bootstrap-room",
        b"x-override-routed-dp-rank",
        b"x-override-disagg-prefill-dp-rank",
    )
)
# Headers of clients that engines do not get: the HTTP client writes its own.
OWN_OF_REQUEST = (
    HOP_BY_HOP
    | SGLANG_OVERRIDES
    | frozenset((b"host", b"content-length", b"expect", b"x-request-id", b"x-kvferry-timeout"))
)
# The HTTP server of the router writes its own date and server; the timing is told with the router's part in it.
# `location`, `content-location` and `alt-svc` name addresses of engines, which clients are not to know or to ask.
OWN_OF_RESPONSE = HOP_BY_HOP | frozenset(
    (
        b"location",
        b"content-location",
        b"alt-svc",
        b"date",
        b"server",
        b"server-timing",
        b"x-request-id",
        b"x-kvferry-path",
        b"x-kvferry-reason",
    )
)

TIMEOUT = b"x-kvferry-timeout"
# What no value of a header may have.
UNSENDABLE = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's `x-request-id`, or a new one. Raises RequestError when engines could misread it."""
    ids = [value.decode("latin-1") for name, value in headers if name.lower() == NAME]
    if not ids:
        return uuid.uuid4().hex
    if len(ids) > 1 or not is_usable(ids[0]):
        raise RequestError(
            "x-request-id cannot be passed to the engines",
            found=", ".join(ids)[:200],
            expected="one id of at most 128 letters, digits and . _ - + = /",
            hint="omit the header to get a generated id",
        )
    return ids[0]


def timeout_of(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """Seconds that the caller has for the whole request (`x-kvferry-timeout`), infinite if it does not say.

    Raises RequestError for what is no time.
    """
    told = [value.decode("latin-1").strip() for name, value in headers if name.lower() == TIMEOUT]
    if not told:
        return math.inf
    if len(told) > 1 or not SECONDS.fullmatch(told[0]) or not float(told[0]):
        raise RequestError(
            "invalid x-kvferry-timeout",
            found=", ".join(told)[:200],
            expected="seconds above 0, such as 30 or 2.5",
            hint="omit the header to use the router's own limits",
        )
    return float(told[0])


def decode_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """The headers of the caller that a decode instance gets."""
    kept = _without_hops(headers, OWN_OF_REQUEST)
    if not any(name == b"content-type" for name, _ in kept):
        kept.append((b"content-type", b"application/json"))
    return [*kept, (b"x-request-id", request_id.encode("latin-1"))]


def prefill_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """The same for a prefill instance, whose answer must be readable here."""
    kept = [pair for pair in decode_headers(headers, request_id) if pair[0] != b"accept-encoding"]
    return [*kept, (b"accept-encoding", b"identity")]


def response_headers(headers: Iterable[tuple[bytes, bytes]], own: dict[str, str]) -> Headers:
    """The headers of an upstream that the client gets, and the router's own."""
    ours = [(name.encode("latin-1"), _encoded(value)) for name, value in own.items()]
    theirs = [pair for pair in _without_hops(headers, OWN_OF_RESPONSE) if not _is_cross_origin(pair[0])]
    return [*theirs, *ours]


def with_length(headers: Headers, num_bytes: int) -> Headers:
    """The same headers for a body of another length."""
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    return [*kept, (b"content-length", str(num_bytes).encode())]


def _encoded(value: str) -> bytes:
    """A value that can be sent, whatever words a policy has found."""
    return UNSENDABLE.sub("?", value).strip(" \t").encode("latin-1")


def _is_cross_origin(name: bytes) -> bool:
    """Whether a header is one of CORS: the router says which pages may read an answer, not the engine behind it."""
    return name.startswith(b"access-control-")


def _without_hops(headers: Iterable[tuple[bytes, bytes]], own: frozenset[bytes]) -> Headers:
    pairs = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")}
    dropped = own | named if named else own
    return [pair for pair in pairs if pair[0] not in dropped]
