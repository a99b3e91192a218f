"""One answer as an ASGI response, streamed or whole, that ends its request when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.embedded.http.request_headers import Caller
from kvferry.embedded.serving.chunks import AnswerChunk, joined
from kvferry.embedded.serving.metrics import Report, summed
from kvferry.embedded.serving.openai_objects import Envelope, OpenAiObjects, usage
from kvferry.embedded.serving.service import Service, TokenizedRequest
from kvferry.errors import FerryError, TransferError
from kvferry.http.openai import SSE_DONE, SSE_MEDIA_TYPE, error_event, error_of, sse

OK, CLIENT_LEFT = 200, 499
# How the cache of this answer came to be.
CACHE_HEADER = "x-kvferry-cache"
# Why it did not come: the label of a counter.
CACHE_REASON_HEADER = "x-kvferry-cache-reason"


class Responder:
    """Answers one call in one shape."""

    def __init__(self, service: Service, shape: OpenAiObjects, call: TokenizedRequest, caller: Caller) -> None:
        self._service = service
        self._shape = shape
        self._call = call
        self._caller = caller
        self._headers = {"x-request-id": caller.request_id}
        info = service.info
        self._envelope = Envelope(f"{shape.id_prefix}{caller.request_id}", int(time.time()), info.model)
        self._status = 500
        self._begun: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute while the client is there."""
        try:
            if not await _while_connected(self._respond(scope, receive, send), receive):
                self._status = CLIENT_LEFT
        finally:
            if self._status != OK:
                self._service.client_left(self._call)
            self._service.metrics.count_request(self._call.ask.leg.kind, self._status)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._service.answer(self._call)) as pieces:
            try:
                # Until there is something to say, an error still has a status of its own.
                first = await anext(pieces)
                if not self._call.ask.stream:
                    body = await self._whole(first, pieces)
            except FerryError as error:
                self._headers |= lost_headers(self._call.ask.leg.kind, error)
                response = error_response(error, self._service.engine.failure, self._headers)
                self._status = response.status_code
                await response(scope, receive, send)
                return
            self._headers |= cache_headers(self._call.ask.leg.kind, first)
            self._status = OK
            if self._call.ask.stream:
                await self._stream(first, pieces, send)
            else:
                await json_response(body, self._headers)(scope, receive, send)

    async def _whole(self, first: AnswerChunk, pieces: AsyncGenerator[AnswerChunk, None]) -> dict[str, Any]:
        by_choice: dict[int, list[AnswerChunk]] = defaultdict(list, {first.index: [first]})
        async for piece in pieces:
            by_choice[piece.index].append(piece)
        wholes = [joined(by_choice[index]) for index in sorted(by_choice)]
        choices = [self._with_ids(self._shape.whole(whole), whole.token_ids) for whole in wholes]
        body = self._with_prompts(self._envelope.around(self._shape.whole_kind, choices))
        body["usage"] = usage(self._call.num_prompt_tokens, sum(len(whole.token_ids) for whole in wholes))
        report = summed([whole.report for whole in wholes])
        return body | self._shown(report) | _reference_of(wholes[0])

    async def _stream(self, piece: AnswerChunk, pieces: AsyncGenerator[AnswerChunk, None], send: Send) -> None:
        await _start_stream(send, self._headers)
        if piece.reference:
            # Only an early leg has one so soon; its caller can begin with the other leg at once.
            await _send(send, sse(self._envelope.around(self._shape.chunk_kind, []) | _reference_of(piece)))
        for choice in self._shape.opening(len(self._call.requests)):
            await _send(send, sse(self._chunk(choice)))
        num_tokens = len(piece.token_ids)
        await self._send_piece(piece, send)
        try:
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                await self._send_piece(piece, send)
        except FerryError as error:
            # The client was told 200; counters are told how it went.
            self._status, body = error_of(error)
            await _send(send, error_event(body["error"]["message"], body["error"]["code"]), more=False)
            return
        if self._call.ask.include_usage:
            last = self._envelope.around(self._shape.chunk_kind, [])
            last["usage"] = usage(self._call.num_prompt_tokens, num_tokens)
            await _send(send, sse(last))
        await _send(send, SSE_DONE, more=False)

    async def _send_piece(self, piece: AnswerChunk, send: Send) -> None:
        is_shown = piece.token_ids and self._call.ask.return_token_ids
        if not (piece.text or piece.finish_reason or is_shown or piece.scored):
            return
        choice = self._with_ids(self._shape.chunk(piece), piece.token_ids)
        chunk = self._chunk(choice)
        last = self._shown(piece.report) | _reference_of(piece) if piece.finish_reason else {}
        await _send(send, sse(chunk | last))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The first one of a choice tells its prompt."""
        body = self._envelope.around(self._shape.chunk_kind, [choice])
        index = choice["index"]
        if index in self._begun:
            return body
        self._begun.add(index)
        return self._with_prompts(body)

    def _with_prompts(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._call.ask.return_token_ids:
            return body
        return self._shape.with_prompts(body, [request.prompt for request in self._call.requests])

    def _shown(self, report: Report) -> dict[str, Any]:
        return {"kvferry": report.as_json()} if self._caller.wants_report else {}

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        return choice | {"token_ids": list(token_ids)} if self._call.ask.return_token_ids else choice


def cache_word(leg: str, piece: AnswerChunk) -> str:
    """`received` from another engine, `recomputed` here because that failed, or `local`: nobody else was asked."""
    if leg != "decode":
        return "local"
    return "recomputed" if piece.report.recomputed else "received"


def cache_headers(leg: str, piece: AnswerChunk) -> dict[str, str]:
    """How the cache came, why it had to be computed here if it did not, and how long each phase took, in ms."""
    report = piece.report
    headers = {CACHE_HEADER: cache_word(leg, piece)}
    if report.recomputed:
        headers[CACHE_REASON_HEADER] = report.recomputed
    if report.phases_s:
        entries = (f"{name};dur={seconds * 1000:.3f}" for name, seconds in report.phases_s.items())
        headers["server-timing"] = ", ".join(entries)
    return headers


def lost_headers(leg: str, error: FerryError) -> dict[str, str]:
    """Of an error instead of an answer: whether the cache is why, and the reason."""
    if leg != "decode" or not isinstance(error, TransferError):
        return {}
    return {CACHE_HEADER: "lost", CACHE_REASON_HEADER: error.reason}


def json_response(body: dict[str, Any], headers: dict[str, str], status: int = 200) -> Response:
    """A JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: FerryError, failure: str, headers: dict[str, str]) -> Response:
    """An error of ours; 503 for whatever went wrong because the engine has failed."""
    status, body = error_of(error)
    return json_response(body, headers, 503 if failure and status == 500 else status)


def _reference_of(piece: AnswerChunk) -> dict[str, Any]:
    return {"kv_transfer_params": piece.reference} if piece.reference else {}


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Whether the work could be done before the client left; if not, it has been cancelled and has cleaned up."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # does nothing to work that is done
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        return False
    working.result()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _start_stream(send: Send, headers: dict[str, str]) -> None:
    pairs = {"content-type": SSE_MEDIA_TYPE, "cache-control": "no-cache"} | headers
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
