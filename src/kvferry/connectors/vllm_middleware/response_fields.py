"""What an answer says of its cache, in the words of our own engine: pure."""

from __future__ import annotations

from kvferry.connectors.vllm_middleware.asgi import Headers, Message, json_messages
from kvferry.connectors.vllm_middleware.transfer_reports import Arrival
from kvferry.errors import TransferError
from kvferry.http.openai import error_of

CACHE, CACHE_REASON, TIMING = b"x-kvferry-cache", b"x-kvferry-cache-reason", b"server-timing"
# What of a head belongs to its body.
OF_BODY = frozenset((b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"))


def with_headers(head: Message, arrival: Arrival) -> Message:
    """The head of an answer that was computed, with how its cache came."""
    word = b"recomputed" if arrival.reason else b"received"
    return {**head, "headers": [*head.get("headers", ()), *_headers(word, arrival)]}


def with_local(head: Message) -> Message:
    """The head of an answer for which no other engine was asked for a cache; that of a refusal as it is."""
    if head["status"] != 200:
        return head
    return {**head, "headers": [*head.get("headers", ()), (CACHE, b"local")]}


def lost(head: Message, arrival: Arrival) -> tuple[Message, Message]:
    """Instead of vLLM's `Internal server error`, which in a stream comes after a status of 200: the answer of our own
    engine to a cache that did not come.
    """
    status, body = error_of(TransferError(arrival.reason, arrival.words))
    kept = [pair for pair in head.get("headers", ()) if pair[0].lower() not in OF_BODY]
    return json_messages(status, body, [*kept, *_headers(b"lost", arrival)])


def _headers(word: bytes, arrival: Arrival) -> Headers:
    headers = [(CACHE, word)]
    if arrival.reason:
        headers.append((CACHE_REASON, arrival.reason.encode()))
    if arrival.phases_s:
        entries = (f"{name};dur={seconds * 1000:.3f}" for name, seconds in arrival.phases_s.items())
        headers.append((TIMING, ", ".join(entries).encode()))
    return headers
