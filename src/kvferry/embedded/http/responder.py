"""One answer as an ASGI response, streamed or whole, that ends its request when the client goes away."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvferry.embedded.serving.chunks import AnswerChunk, joined
from kvferry.embedded.serving.metrics import Report, summed
from kvferry.embedded.serving.openai_objects import ChatObjects, CompletionObjects, usage
from kvferry.embedded.serving.service import Service, TokenizedRequest
from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.http.asgi import CLIENT_CLOSED_REQUEST, json_response, server_timing, while_connected
from kvferry.http.openai import REPORT_HEADER, SSE_DONE, SSE_MEDIA_TYPE, error_event, error_of, sse
from kvferry.http.request_ids import is_usable

OK = 200
IS_COUNTED = "kvferry.is_counted"
"""Set in the scope of a request whose end the counters know."""
# How the cache of this answer came to be.
CACHE_HEADER = "x-kvferry-cache"
# Why it did not come: the label of a counter.
CACHE_REASON_HEADER = "x-kvferry-cache-reason"
YES_OR_NO = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Caller:
    """`request_id` goes into references and logs. With `wants_report` the answer has the object `kvferry`."""

    request_id: str
    wants_report: bool = False


def caller_of(headers: Mapping[str, str]) -> Caller:
    """The caller, from headers whose names are looked up in lower case. Raises RequestError."""
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
    """Whether a report is wanted. Another value is refused: its sender would look for an object that does not come."""
    wanted = False if given is None else YES_OR_NO.get(given.strip().lower())
    if wanted is None:
        raise RequestError(
            f"{REPORT_HEADER} cannot be understood",
            found=(given or "")[:200],
            expected="true or false",
            hint="leave the header out for an answer without a report",
        )
    return wanted


class Responder:
    """Answers one call in one shape."""

    def __init__(
        self, service: Service, shape: CompletionObjects | ChatObjects, call: TokenizedRequest, caller: Caller
    ) -> None:
        self._service = service
        self._shape = shape
        self._call = call
        self._caller = caller
        self._headers = {"x-request-id": caller.request_id}
        self._created = int(time.time())
        self._status = 500
        self._begun: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send the answer while the client is there."""
        try:
            await while_connected(self._respond(scope, receive, send), receive)
        except ClientDisconnect:
            self._status = CLIENT_CLOSED_REQUEST
        finally:
            scope[IS_COUNTED] = True
            if self._status != OK:
                self._service.client_left(self._call)
            self._service.metrics.count_request(self._call.ask.role.kind, self._status)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._service.answer(self._call)) as pieces:
            try:
                # Until there is something to say, an error still has a status of its own.
                first = await anext(pieces)
                if not self._call.ask.stream:
                    body = await self._whole(first, pieces)
            except FerryError as error:
                self._headers |= lost_headers(self._call.ask.role.kind, error)
                response = error_response(error, self._service.engine.failure, self._headers)
                self._status = response.status_code
                await response(scope, receive, send)
                return
            self._headers |= cache_headers(self._call.ask.role.kind, first.report)
            self._status = OK
            if self._call.ask.stream:
                headers = {"content-type": SSE_MEDIA_TYPE, "cache-control": "no-cache"} | self._headers
                await StreamingResponse(self._events(first, pieces), OK, headers).stream_response(send)
            else:
                await json_response(200, body, self._headers)(scope, receive, send)

    async def _whole(self, first: AnswerChunk, pieces: AsyncIterator[AnswerChunk]) -> dict[str, Any]:
        by_choice: dict[int, list[AnswerChunk]] = defaultdict(list, {first.index: [first]})
        async for piece in pieces:
            by_choice[piece.index].append(piece)
        wholes = [joined(by_choice[index]) for index in sorted(by_choice)]
        choices = [self._with_ids(self._shape.whole(whole), whole.token_ids) for whole in wholes]
        body = self._with_prompts(self._object(self._shape.whole_kind, choices))
        body["usage"] = usage(self._call.num_prompt_tokens, sum(len(whole.token_ids) for whole in wholes))
        report = summed([whole.report for whole in wholes])
        return body | self._shown(report) | _reference_of(wholes[0])

    async def _events(self, first: AnswerChunk, pieces: AsyncIterator[AnswerChunk]) -> AsyncIterator[bytes]:
        """The answer as server-sent events. The client was told 200: an error is one more event."""
        if first.reference:
            # Only an early prefill has one so soon; its caller can begin with the decode request at once.
            yield sse(self._object(self._shape.chunk_kind, []) | _reference_of(first))
        for choice in self._shape.opening(len(self._call.requests)):
            yield sse(self._chunk(choice))
        num_tokens = len(first.token_ids)
        if self._shows(first):
            yield self._event_of(first)
        try:
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                if self._shows(piece):
                    yield self._event_of(piece)
        except FerryError as error:
            # Counters are told how it went.
            self._status, body = error_of(error)
            yield error_event(body["error"]["message"], body["error"]["code"])
            return
        if self._call.ask.include_usage:
            counted = {"usage": usage(self._call.num_prompt_tokens, num_tokens)}
            yield sse(self._object(self._shape.chunk_kind, []) | counted)
        yield SSE_DONE

    def _shows(self, piece: AnswerChunk) -> bool:
        is_shown = piece.token_ids and self._call.ask.return_token_ids
        return bool(piece.text or piece.finish_reason or is_shown or piece.scored)

    def _event_of(self, piece: AnswerChunk) -> bytes:
        chunk = self._chunk(self._with_ids(self._shape.chunk(piece), piece.token_ids))
        last = self._shown(piece.report) | _reference_of(piece) if piece.finish_reason else {}
        return sse(chunk | last)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object of the answer, with the fields that every one of its objects repeats."""
        return {
            "id": f"{self._shape.id_prefix}{self._caller.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._service.info.model,
            "choices": choices,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return one object of a stream. The first one of a choice tells its prompt."""
        body = self._object(self._shape.chunk_kind, [choice])
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
        return {"kvferry": asdict(report)} if self._caller.wants_report else {}

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        return choice | {"token_ids": list(token_ids)} if self._call.ask.return_token_ids else choice


def cache_headers(role: str, report: Report) -> dict[str, str]:
    """How the cache came: `received` from another engine, `recomputed` here because that failed, and why, or `local`,
    where nobody else was asked; and how long each phase took, in ms."""
    received = "recomputed" if report.recomputed else "received"
    headers = {CACHE_HEADER: received if role == "decode" else "local"}
    if report.recomputed:
        headers[CACHE_REASON_HEADER] = report.recomputed
    if report.phases_s:
        headers["server-timing"] = server_timing(report.phases_s)
    return headers


def lost_headers(role: str, error: FerryError) -> dict[str, str]:
    """The headers of an error that comes instead of an answer: whether the cache is why, and the reason."""
    if role != "decode" or not isinstance(error, TransferError):
        return {}
    return {CACHE_HEADER: "lost", CACHE_REASON_HEADER: error.reason}


def error_response(error: FerryError, failure: str, headers: dict[str, str]) -> Response:
    """The response to an error, with status 503 for whatever went wrong because the engine has failed."""
    status, body = error_of(error)
    return json_response(503 if failure and status == 500 else status, body, headers)


def _reference_of(piece: AnswerChunk) -> dict[str, Any]:
    return {"kv_transfer_params": piece.reference} if piece.reference else {}
