"""One leg of a request: a POST to one instance, under the time limits of its role."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvferry.router.answers import streamed_error
from kvferry.router.events import TOO_LATE, Answered, Failed, Opened
from kvferry.router.headers import Headers
from kvferry.router.policy import Instance, Role
from kvferry.router.services import Services
from kvferry.router.upstream import (
    DEADLINE,
    FAILURES,
    GONE,
    RESET,
    STALL,
    WORDS,
    Exchange,
    Outgoing,
    reason_of,
)

__all__ = ["Head", "Leg"]


NOT_WAITING = -1.0


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an upstream's response."""

    status: int
    headers: Headers


class Leg:
    """`ask` once; after `Opened`, `piece` until it is empty. Failures come back as events, never as exceptions.

    After `deadline_s`, monotonic time, nothing is waited for.
    """

    def __init__(self, services: Services, instance: Instance, outgoing: Outgoing, deadline_s: float) -> None:
        self.instance = instance
        self._services = services
        self._outgoing = outgoing
        self._exchange: Exchange | None = None
        self._first = b""
        # What exactly went wrong, for the log: it names hosts and ports of the inside.
        self.trouble = ""
        self._watch: asyncio.TimerHandle | None = None
        self._waits_since_s = NOT_WAITING
        self._deadline_s = deadline_s
        # Which limit ended a stream, if one did.
        self._given_up = ""

    @property
    def head(self) -> Head:
        """What the upstream answered; a status of 0 before it did."""
        if self._exchange is None:
            return Head(0, [])
        return Head(self._exchange.status, list(self._exchange.headers))

    @property
    def is_event_stream(self) -> bool:
        """Whether tokens can be told apart as they come."""
        return self._exchange is not None and self._exchange.is_plain_event_stream

    @property
    def is_over(self) -> bool:
        """Whether the piece that came last was the last one."""
        return self._exchange is not None and self._exchange.is_over

    async def ask(self) -> Answered | Opened | Failed:
        """Send the request and wait for the answer: D's success up to its first byte, all others whole."""
        limit_s, left_s = self._limit_s(), self._left_s()
        if left_s <= 0:
            return Failed(TOO_LATE, WORDS[TOO_LATE])
        try:
            async with asyncio.timeout(min(limit_s, left_s)):
                return await self._ask()
        except FAILURES as error:
            return self._failed(error, TOO_LATE if left_s < limit_s else DEADLINE)

    async def piece(self) -> bytes | Failed:
        """The next bytes of an opened answer, empty at its end."""
        if self._exchange is None:
            return b""
        if self._first:
            first, self._first = self._first, b""
            return first
        self._waits_since_s = time.monotonic()
        if self._watch is None:
            self._watch_silence(min(self._services.config.stall_timeout_s, self._left_s()))
        try:
            return await self._exchange.piece()
        except FAILURES as error:
            return self._failed(TimeoutError() if self._given_up else error, self._given_up or STALL)
        finally:
            self._waits_since_s = NOT_WAITING

    def _watch_silence(self, in_s: float) -> None:
        """One timer for a whole stream, that looks again when it was early: one per piece would cost more than it."""
        self._watch = asyncio.get_running_loop().call_later(in_s, self._look_for_silence)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        # While a slow client takes its time, nothing is expected of the engine.
        silent_s = now - self._waits_since_s if self._waits_since_s != NOT_WAITING else 0.0
        left_s = min(self._services.config.stall_timeout_s - silent_s, self._left_s())
        if left_s > 0:
            self._watch_silence(left_s)
        elif self._exchange is not None:
            self._given_up = TOO_LATE if self._left_s() <= 0 else STALL
            self._exchange.close()

    def close(self) -> None:
        """Close the connection; the upstream sees its client leave."""
        if self._watch is not None:
            self._watch.cancel()
        if self._exchange is not None:
            self._exchange.close()

    async def _ask(self) -> Answered | Opened:
        exchange = self._exchange = await Exchange.open(self._services.pool, self._outgoing)
        if self.instance.role is Role.DECODE and 200 <= exchange.status < 300:
            self._first = await exchange.piece()
            failed = streamed_error(self._first) if exchange.is_plain_event_stream else 0
            if not failed:
                return Opened(exchange.is_plain_event_stream)
            # An engine that begins a stream before it knows how that will go: nothing of it has reached the client.
            return Answered(failed, self._first + await exchange.whole(self._services.config.max_answer_bytes))
        body = await exchange.whole(self._services.config.max_answer_bytes)
        return Answered(exchange.status, body)

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _limit_s(self) -> float:
        config = self._services.config
        return config.prefill_timeout_s if self.instance.role is Role.PREFILL else config.decode_timeout_s

    def _failed(self, error: BaseException, timeout_reason: str) -> Failed:
        self.close()
        reason = reason_of(error, timeout_reason)
        self.trouble = f" ({error!r})"
        if reason in GONE:
            self._services.membership.lose(self.instance, reason)
        elif reason == RESET:
            self._services.membership.doubt()
        return Failed(reason, WORDS[reason])
