"""Passes the answer of a decode instance on to the client, with the prefill instance's usage in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvferry.router.answers.answer_format import AnswerFormat, StreamEnd, WholeEvents
from kvferry.router.events import ClientGone, Ended, Event, Failed
from kvferry.router.flow.client import Client
from kvferry.router.flow.early_prefill import PrefillUsage
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.flow.upstream_request import UpstreamRequest
from kvferry.router.request.headers import Headers, with_length

OnTokens = Callable[[bytes, float], None]


class Relay:
    """`run` once; its event is the end of the answer. `outcomes` hears that end before the client does. A client that
    leaves when it has the last event has all that it needs: some do not wait for the end of a stream."""

    def __init__(
        self,
        request: UpstreamRequest,
        client: Client,
        outcomes: OutcomeRecorder,
        usage: PrefillUsage,
        answer_format: AnswerFormat,
        on_tokens: OnTokens,
    ) -> None:
        self._request = request
        self._client = client
        self._outcomes = outcomes
        self._usage = usage
        self._format = answer_format
        self._on_tokens = on_tokens
        self._end = StreamEnd(answer_format)
        # The status of an error event that has gone by.
        self._failed_with = 0
        self._is_told = False

    async def run(self, headers: Headers, max_kept_bytes: int) -> Event:
        """An answer that is not streamed has its usage at its end: it is kept here until then if it is short enough."""
        if not self._request.is_event_stream and self._outcomes.has_arrived and self._request.is_plain_json:
            return await self._pass_on_whole(headers, max_kept_bytes)
        await self._client.start(self._request.status, headers)
        if self._request.is_event_stream:
            return await self._pass_on_events()
        return await self._pass_on_rest()

    async def _piece(self) -> bytes | Failed:
        piece = await self._request.piece()
        if isinstance(piece, Failed):
            self._tell(Ended() if self._end.is_over else piece)
        elif self._request.is_over:
            self._tell(Ended())
        return piece

    def _tell(self, event: Event) -> None:
        if not self._is_told:
            self._is_told = True
            self._outcomes.hears(event, [], 0.0)

    def left(self) -> Event:
        """The end of an answer whose client has left: `Ended` if it had the last event, else `ClientGone`."""
        if not self._end.is_over:
            return ClientGone()
        self._tell(self._end_of_events())
        return self._end_of_events()

    async def _pass_on_whole(self, headers: Headers, max_kept_bytes: int) -> Event:
        found = bytearray()
        while len(found) <= max_kept_bytes:
            piece = await self._piece()
            if isinstance(piece, Failed):
                return replace(piece, is_withheld=True)
            found += piece
            if self._request.is_over:
                return await self._finish_whole(bytes(found), headers)
        await self._client.start(self._request.status, headers)
        await self._client.pass_on(bytes(found))
        return await self._pass_on_rest()

    async def _finish_whole(self, body: bytes, headers: Headers) -> Event:
        if self._format.tells_usage(body):
            await self._usage.wait()
        body = self._format.with_cached_tokens(body, self._usage.cached_tokens)
        await self._client.start(self._request.status, with_length(headers, len(body)))
        await self._client.finish(body)
        return Ended()

    async def _pass_on_rest(self) -> Event:
        while True:
            piece = await self._piece()
            if isinstance(piece, Failed):
                return piece
            if self._request.is_over:
                await self._client.finish(piece)
                return Ended()
            await self._client.pass_on(piece)

    async def _pass_on_events(self) -> Event:
        """Pass on whole events: where an answer breaks off, half of one would be all that some clients tell of it."""
        events = WholeEvents(self._format.max_event_bytes)
        while True:
            piece = await self._request.piece()
            if isinstance(piece, Failed) and not self._end.is_over:
                self._tell(piece)
                return piece
            is_over = isinstance(piece, Failed) or self._request.is_over
            whole = b""
            if not isinstance(piece, Failed):
                self._on_tokens(piece, time.monotonic())
                whole = events.feed(piece)
                self._failed_with = self._failed_with or self._format.failed_amid(whole)
            if is_over:
                self._tell(self._end_of_events())
            if self._outcomes.has_arrived:
                whole = await self._with_usage(whole)
            if is_over:
                await self._client.finish(whole + events.rest())
                return self._end_of_events()
            if whole:
                await self._client.pass_on(whole)
                self._end.feed(whole)

    def _end_of_events(self) -> Event:
        if not self._failed_with:
            return Ended()
        return Failed(f"status_{self._failed_with}", "the engine's own error event", is_told=True)

    async def _with_usage(self, events: bytes) -> bytes:
        """Return whole events with the prefill engine's figure in them. No token waits for the figure."""
        if not self._format.tells_usage(events):
            return events
        at, changed = self._format.before_final_usage(events), self._format.with_cached_tokens_in_events
        if self._usage.may_come and at < len(events):
            if at:
                await self._client.pass_on(changed(events[:at], self._usage.cached_tokens))
            await self._usage.wait()
            events = events[at:]
        return changed(events, self._usage.cached_tokens)
