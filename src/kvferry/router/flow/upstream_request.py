"""A prefill or decode request: a POST to one instance, under the time limits of its role."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvferry.errors import PeerError
from kvferry.http.client_errors import client_error_text
from kvferry.router.answers.answer_format import AnswerFormat
from kvferry.router.answers.engine_response import is_recomputed, promised_cache, stream_failure, streamed_error
from kvferry.router.events import INSTANCE_DOWN, NOT_WANTED, TOO_LATE, Answered, Ended, Failed, Opened, Promised
from kvferry.router.fleet.instance import Reservation
from kvferry.router.policy.records import Instance, Role
from kvferry.router.request.headers import Headers
from kvferry.router.services import Services
from kvferry.router.telemetry.tracing import UpstreamTrace
from kvferry.router.upstream.failures import DEADLINE, FAILURES, GONE, MALFORMED, MESSAGES, RESET, STALL, reason_of
from kvferry.router.upstream.http_client import HttpRequest, HttpResponse

NOT_WAITING = -1.0
END_OF_EVENT, DONE = b"\n\n", b"data: [DONE]"
# The limit for a prefill stream: a reference, a token, and the end.
MAX_STREAM_BYTES = 1 << 20
# How much the log shows of an engine's words for what went wrong.
MAX_SHOWN_BYTES = 200


@dataclass(frozen=True, slots=True)
class Timeouts:
    """An answer may take `limit_s` to come, or to begin; after `deadline_s`, monotonic time, nothing is waited for."""

    limit_s: float
    deadline_s: float


class UpstreamRequest:
    """`ask` once; after `Opened`, `piece` until it is empty; after `Promised`, `rest`. Or `run` it to its end.

    Failures come back as events, never as exceptions.
    """

    def __init__(
        self,
        services: Services,
        reservation: Reservation,
        trace: UpstreamTrace,
        request: HttpRequest,
        timeouts: Timeouts,
        answer_format: AnswerFormat,
    ) -> None:
        self.reservation = reservation
        self.trace = trace
        self._services = services
        self._request = request
        self._response: HttpResponse | None = None
        self._first = b""
        # What exactly went wrong, for the log: it names hosts and ports of the inside.
        self.trouble = ""
        self._watch: asyncio.TimerHandle | None = None
        self._waits_since_s = NOT_WAITING
        self._timeouts = timeouts
        self._format = answer_format
        # When a limit ends what began with `ask`, and which one.
        self._ends_s, self._limit = 0.0, ""
        # It was closed by our own side, perhaps for a reason.
        self._is_closed, self._given_up_for = False, ""
        # The time limit, while an answer is waited for.
        self._asking: asyncio.Timeout | None = None
        # Which limit ended a stream, if one did.
        self._given_up = ""
        # Whether the rest of an early prefill is waited for, and how much of its prompt it had cached, when it tells.
        self._is_resting = False
        self.cached_tokens: int | None = None

    @property
    def instance(self) -> Instance:
        return self.reservation.instance

    @property
    def status(self) -> int:
        """The status of the answer; 0 before it comes."""
        return self._response.status if self._response else 0

    @property
    def headers(self) -> Headers:
        """The headers of the answer; empty before it comes."""
        return self._response.headers if self._response else []

    @property
    def is_event_stream(self) -> bool:
        """Whether tokens can be told apart as they come."""
        return self._response is not None and self._response.is_plain_event_stream

    @property
    def is_plain_json(self) -> bool:
        """Whether the answer is one JSON value whose bytes can be read here."""
        told = {name.lower(): value.lower() for name, value in self.headers}
        media_type = told.get(b"content-type", b"").partition(b";")[0].strip()
        return media_type == b"application/json" and told.get(b"content-encoding", b"identity") == b"identity"

    @property
    def is_over(self) -> bool:
        """Whether the piece that came last was the last one."""
        return self._response is not None and self._response.is_over

    async def ask(self) -> Answered | Promised | Opened | Failed:
        """Send the request and wait for the answer: D's success up to its first byte, P's stream up to its first event,
        all others whole."""
        limit_s, left_s = self._timeouts.limit_s, self._left_s()
        if self._is_closed:
            return Failed(NOT_WANTED, MESSAGES[NOT_WANTED])
        if left_s <= 0:
            return Failed(TOO_LATE, MESSAGES[TOO_LATE])
        self._ends_s, self._limit = time.monotonic() + min(limit_s, left_s), TOO_LATE if left_s < limit_s else DEADLINE
        self._services.pool.open_requests.began(self)
        try:
            async with asyncio.timeout(self._ends_s - time.monotonic()) as self._asking:
                answered = await self._ask()
        except FAILURES as error:
            return self._failed(error, self._limit)
        finally:
            self._asking = None
        if self._given_up_for and not isinstance(answered, Failed):
            # It has come in the very moment in which it was given up: nothing has been closed.
            self._is_closed, self._given_up_for = False, ""
        return answered

    async def run(self) -> Answered | Ended | Failed:
        """Ask, and return `Ended` after a whole good answer, or else the error. The answer itself does not matter."""
        event = await self.ask()
        if isinstance(event, Answered) and 200 <= event.status < 300:
            self.cached_tokens = self._format.cached_tokens_of(event.body)
            return Ended()
        if isinstance(event, Answered | Failed):
            return event
        return self._failed(_no_whole_answer(self._first), MALFORMED)

    async def rest(self) -> Answered | Ended | Failed:
        """Read what follows a promise. Return its end, or the error that the stream ended with."""
        if self._response is None or self._is_closed:
            return Ended()
        self._is_resting = True
        try:
            async with asyncio.timeout(self._ends_s - time.monotonic()):
                body = self._first + await self._response.whole(MAX_STREAM_BYTES)
        except FAILURES as error:
            return self._failed(error, self._limit)
        finally:
            self._is_resting = False
        if failure := stream_failure(body):
            return Answered(streamed_error(b"data:" + failure + END_OF_EVENT), failure)
        self.cached_tokens = self._format.cached_tokens_of_stream(body)
        return Ended() if DONE in body else self._failed(_no_end(body), MALFORMED)

    async def piece(self) -> bytes | Failed:
        """The next bytes of an opened answer, empty at its end."""
        if self._response is None:
            return b""
        if self._first:
            first, self._first = self._first, b""
            return first
        self._waits_since_s = time.monotonic()
        if self._watch is None:
            self._watch_silence(min(self._services.config.stall_timeout_s, self._left_s()))
        try:
            return await self._response.piece()
        except FAILURES as error:
            return self._failed(TimeoutError() if self._given_up else error, self._given_up or STALL)
        finally:
            self._waits_since_s = NOT_WAITING

    def _watch_silence(self, in_s: float) -> None:
        """Start the one timer of a stream, which looks again if it was early. A timer per piece would cost too much."""
        self._watch = asyncio.get_running_loop().call_later(in_s, self._look_for_silence)

    def _look_for_silence(self) -> None:
        left_s = min(self._services.config.stall_timeout_s - self._silent_s(), self._left_s())
        if left_s > 0:
            self._watch_silence(left_s)
        elif self._response is not None:
            self._given_up = TOO_LATE if self._left_s() <= 0 else STALL
            self._response.close()

    def give_up(self, reason: str) -> None:
        """End it with this reason, if its answer has not begun."""
        if self._asking is not None and not self._asking.expired():
            self._is_closed, self._given_up_for = True, reason
            self._asking.reschedule(asyncio.get_running_loop().time())

    def instance_is_down(self) -> None:
        """End the request if its answer has not begun, or was silent while a probe was not answered. An answer that
        still comes refutes the probe."""
        if self._asking is not None:
            self.give_up(INSTANCE_DOWN)
        elif self._response is not None and self._is_resting:
            self._is_closed, self._given_up_for = True, INSTANCE_DOWN
            self._response.close()
        elif self._response is not None and self._silent_s() >= self._services.config.probe_timeout_s:
            self._given_up = INSTANCE_DOWN
            self._response.close()

    def _silent_s(self) -> float:
        """How long bytes of the engine have been waited for. The time of a slow client is not the engine's."""
        return time.monotonic() - self._waits_since_s if self._waits_since_s != NOT_WAITING else 0.0

    def close(self) -> None:
        """Close the connection; the upstream sees its client leave."""
        self._services.pool.open_requests.ended(self)
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._response is not None:
            self._response.close()

    async def _ask(self) -> Answered | Promised | Opened | Failed:
        response = self._response = await self._services.http.send(self._request)
        is_decode, is_stream = self.instance.role is Role.DECODE, response.is_plain_event_stream
        if not 200 <= response.status < 300 or not (is_decode or is_stream):
            body = await response.whole(self._services.config.max_answer_bytes)
            self.trouble = f" ({body[:MAX_SHOWN_BYTES].decode(errors='replace')!r})" if response.status >= 500 else ""
            return Answered(response.status, body)
        if not is_decode:
            self._first = await self._first_event(response)
        else:
            self._first = await (self._first_token(response) if is_stream else response.piece())
        failed = self._format.failed_at_once(self._first) if is_stream else 0
        if failed:
            # An engine that begins a stream before it knows how that will go: nothing of it has reached the client.
            body = self._first + await response.whole(self._services.config.max_answer_bytes)
            return Answered(failed, self._format.error_of(body))
        if is_decode:
            return Opened(is_stream, is_recomputed(response.headers))
        promised = promised_cache(self._first)
        return Promised(promised) if promised else self._failed(_no_promise(self._first), MALFORMED)

    async def _first_token(self, response: HttpResponse) -> bytes:
        """The bytes up to the first event that says more than that an answer has begun, which engines say before they
        know how it will go."""
        found, max_bytes = await response.piece(), self._services.config.max_answer_bytes
        while found and self._format.opening_bytes(found) == len(found) <= max_bytes:
            if not (piece := await response.piece()):
                break
            found += piece
        return found

    async def _first_event(self, response: HttpResponse) -> bytes:
        """The bytes up to the end of the first event, or a few more. Raises PeerError when it is too long."""
        found, looked_at = bytearray(), 0
        while found.find(END_OF_EVENT, looked_at) < 0 and (piece := await response.piece()):
            looked_at = max(0, len(found) - 1)
            found += piece
            if len(found) > MAX_STREAM_BYTES:
                raise PeerError("an event is too long", found="more", expected=f"at most {MAX_STREAM_BYTES} bytes")
        return bytes(found)

    def _left_s(self) -> float:
        return self._timeouts.deadline_s - time.monotonic()

    def _failed(self, error: BaseException, timeout_reason: str) -> Failed:
        was_closed = self._is_closed
        self.close()
        reason = self._given_up_for or reason_of(error, timeout_reason)
        self.trouble = f" ({client_error_text(error) if isinstance(error, Exception) else repr(error)})"
        if was_closed:
            # What our own side has done says nothing about the instance.
            return Failed(reason, MESSAGES[reason])
        if reason in GONE:
            self._services.pool.mark_down(self.instance, reason)
        elif reason == RESET:
            self._services.pool.request_probe(self.instance)
        return Failed(reason, MESSAGES[reason])


def _no_end(body: bytes) -> PeerError:
    return PeerError("the prefill stream was interrupted", found=repr(body[-200:]), expected=DONE.decode())


def _no_whole_answer(event: bytes) -> PeerError:
    return PeerError(
        "a prefill answer comes as a stream", found=repr(event[:200]), expected="a JSON object, as asked for"
    )


def _no_promise(event: bytes) -> PeerError:
    return PeerError(
        "a prefill stream does not begin with a reference",
        found=repr(event[:200]),
        expected="an event with kv_transfer_params",
        hint="its /kvferry/info says that it does (early)",
    )
