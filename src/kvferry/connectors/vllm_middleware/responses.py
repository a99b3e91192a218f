"""Answers of vLLM on their way out, with what is said of their caches."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from kvferry.connectors.vllm_middleware.worker_reports import FetchOutcome, FetchOutcomes, PrefillStarts
from kvferry.errors import TransferError
from kvferry.http.anthropic import error_for
from kvferry.http.asgi import json_response, server_timing
from kvferry.http.openai import OPENING_EVENTS, SSE_MEDIA_TYPE, error_of

CACHE, CACHE_REASON, TIMING = b"x-kvferry-cache", b"x-kvferry-cache-reason", b"server-timing"
BODY_HEADERS = frozenset((b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"))


class HeldResponse:
    """Passes everything on. The head of a decode request's answer waits for its first token, and gets its headers.

    vLLM begins a stream at once; by the time of its first token it is known how the cache came. Events that come before
    that token, as those of a response do, wait as well. `names` are vLLM's
    names for the decode request, one per prompt; none for one of which vLLM tells nothing, and for any other request,
    which `is_local`. Of several prompts the first one's cache counts, unless the answer is an error.
    """

    def __init__(self, path: str, outcomes: FetchOutcomes, names: tuple[str, ...], is_local: bool, send: Send) -> None:
        self._path = path
        self._outcomes = outcomes
        self._names = names
        self._is_local = is_local
        self._send = send
        self._head: Message | None = None
        self._before_first_token: list[Message] = []
        self._is_replaced = False
        for name in names:
            outcomes.expect(name)

    async def send(self, message: Message) -> None:
        """The next message of vLLM; nothing follows an answer that was replaced."""
        if self._is_replaced:
            return
        if self._names and message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            if _is_opening(message):
                self._before_first_token.append(message)
                return
            head, self._head = self._head, None
            await self._send_head(head)
        if not self._is_replaced:
            await self._send(with_local(message) if self._is_local else message)

    async def explains_failure(self) -> bool:
        """vLLM cannot say in a stream of a response that its cache was lost: it fails. Then that is answered here."""
        if self._head is not None and self._outcomes.failure(self._names[0]) is not None:
            await self._send_head(self._head)
        return self._is_replaced

    def close(self) -> None:
        """The request is over, however."""
        for name in self._names:
            self._outcomes.forget(name)

    async def _send_head(self, head: Message) -> None:
        outcome = self._outcomes.known(self._names[0])
        if head["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
            outcome = next(filter(None, map(self._outcomes.failure, self._names)), outcome)
        if outcome is not None and outcome.is_fatal and not outcome.is_aborted:
            self._is_replaced = True
            for message in _lost(self._path, head, outcome):
                await self._send(message)
            return
        if outcome is None or outcome.is_aborted:
            await self._send(head)
        else:
            await self._send(_with(head, _cache_headers(b"recomputed" if outcome.reason else b"received", outcome)))
        for message in self._before_first_token:
            await self._send(message)


class Delivery:
    """Passes an answer on. It `is_done` when the client has it: whole, no failure, and before the client has left."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._status = 0
        self.is_done = False

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif not message.get("more_body", False):
            # Afterwards servers say of every client that it has left.
            self.is_done = self._status < 500 and not await self._has_left()
        await self._send(message)

    async def _has_left(self) -> bool:
        """vLLM answers a client that has left with a status of 200, and does not listen any more once it has an answer.
        The server drops both without a word."""
        hearing = asyncio.ensure_future(self._receive())
        await asyncio.wait((hearing,), timeout=0)
        if hearing.done():
            return bool(hearing.result()["type"] == "http.disconnect")
        hearing.cancel()
        return False


class EarlyResponse:
    """Puts an event before those of a stream that vLLM has begun; any other answer passes as it is.

    Not before vLLM computes for the request: a decode side that made room for a prompt that waits for its turn would
    keep that room from others, and the prompt may be waiting for just these. Where vLLM does not tell when it computes,
    the event comes with its own first one.
    """

    def __init__(self, starts: PrefillStarts, name: str, first_event: Message, send: Send) -> None:
        self._starts = starts
        self._name = name
        self._first_event: Message | None = first_event
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._has_started = asyncio.Event()
        # Only of a stream.
        self._waiting: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        # Called from whatever thread.
        starts.expect(name, lambda: self._loop.call_soon_threadsafe(self._has_started.set))

    async def send(self, message: Message) -> None:
        """The next message of vLLM."""
        if self._waiting is not None:
            await self._send_first_event()
        await self._send(with_local(message))
        if message["type"] == "http.response.start" and _is_event_stream(message):
            self._waiting = asyncio.create_task(self._wait_for_start())

    async def explains_failure(self) -> bool:
        """A prefill fetches nothing that could be lost."""
        return False

    def close(self) -> None:
        """The request is over, however."""
        self._starts.forget(self._name)
        if self._waiting is not None:
            self._waiting.cancel()

    async def _wait_for_start(self) -> None:
        await self._has_started.wait()
        await self._send_first_event()

    async def _send_first_event(self) -> None:
        async with self._one_at_a_time:
            if self._first_event is not None:
                event, self._first_event = self._first_event, None
                await self._send(event)


def with_local(message: Message) -> Message:
    """The head of an answer for which no other engine was asked for a cache; of a refusal, and of a body, nothing is
    said."""
    is_answered = message["type"] == "http.response.start" and message["status"] == 200
    return _with(message, [(CACHE, b"local")]) if is_answered else message


def _is_event_stream(head: Message) -> bool:
    """Whether an answer begins to stream, so that an event can go before the others."""
    media_type = Headers(raw=head.get("headers", [])).get("content-type", "")
    return head["status"] == 200 and media_type.startswith(SSE_MEDIA_TYPE)


def _is_opening(message: Message) -> bool:
    """Whether these are events that say only that a response has begun."""
    body = message.get("body", b"")
    return bool(message.get("more_body")) and body.startswith(OPENING_EVENTS)


def _with(head: Message, headers: list[tuple[bytes, bytes]]) -> Message:
    return {**head, "headers": [*head.get("headers", ()), *headers]}


def _lost(path: str, head: Message, outcome: FetchOutcome) -> tuple[Message, Message]:
    """Instead of vLLM's `Internal server error`, which in a stream comes after a status of 200: the answer of our own
    engine to a cache that did not come."""
    status, body = error_of(TransferError(outcome.reason, outcome.words))
    response = json_response(status, error_for(path, body))
    kept = [pair for pair in head.get("headers", ()) if pair[0].lower() not in BODY_HEADERS]
    headers = [*response.raw_headers, *kept, *_cache_headers(b"lost", outcome)]
    start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    return start, {"type": "http.response.body", "body": response.body}


def _cache_headers(word: bytes, outcome: FetchOutcome) -> list[tuple[bytes, bytes]]:
    headers = [(CACHE, word)]
    if outcome.reason:
        headers.append((CACHE_REASON, outcome.reason.encode()))
    if outcome.phases_s:
        headers.append((TIMING, server_timing(outcome.phases_s).encode()))
    return headers
