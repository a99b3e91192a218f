"""Carries out a flow's commands: where a request's flow meets its client, its legs and the clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.router.client import CLIENT_LEFT, Client
from kvferry.router.early import EarlyPrefill
from kvferry.router.events import (
    Answered,
    Began,
    Cancel,
    ClientGone,
    Command,
    Count,
    Counted,
    Cut,
    Ended,
    EndWithError,
    Event,
    Failed,
    Forward,
    NobodyPicked,
    Opened,
    Path,
    Pick,
    Picked,
    Promised,
    Refuse,
    Relay,
    Release,
    Send,
    Skipped,
    TurnedAway,
)
from kvferry.router.flow import Flow
from kvferry.router.headers import Headers, decode_headers, prefill_headers, response_headers
from kvferry.router.judge import Judge
from kvferry.router.leg import Head, Leg, Patience
from kvferry.router.membership import Wanted
from kvferry.router.pace import Pace
from kvferry.router.policy import Busy, Instance, Role, Skip, Task
from kvferry.router.request import ClientRequest
from kvferry.router.reservation import Reservation
from kvferry.router.services import Services
from kvferry.router.story import Story, outcome_of
from kvferry.router.timing import server_timing
from kvferry.router.upstream import Outgoing

__all__ = ["Call", "Driver"]

RELEASE_PATH = "/kvferry/release"
# P may have answered in the moment in which the client left: its word is on its way, and keeps blocks for nobody. Much
# longer, and P would compute in vain.
LAST_WORD_S = 0.2
# What counts an answer that has begun well and ended badly.
BROKEN_OFF = 502

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request: `target` is path and query, `headers` are as they came.

    `started_s` and `deadline_s`, after which the client has no use for an answer, are monotonic time.
    """

    target: str
    headers: Headers
    request_id: str
    request: ClientRequest
    task: Task
    started_s: float
    deadline_s: float


class Driver:
    """One request from its first event to its last."""

    def __init__(self, services: Services, call: Call, client: Client) -> None:
        self.flow = Flow(call.request)
        self._services = services
        self._call = call
        self._client = client
        self._held: dict[Role, Reservation] = {}
        # All legs so far; the last one is in flight, and an early one beside it.
        self._legs: list[Leg] = []
        self._early: list[EarlyPrefill] = []
        self._answer = (Head(0, []), b"")
        self._judge = Judge(services.membership, call.task, call.request.streams)
        self.pace = Pace(call.started_s)
        self._trace = services.tracing.begin(call.headers, call.request_id)

    async def run(self) -> None:
        """Serve the request. Cancelling it closes the upstream connection."""
        event: Event | None = Began()
        try:
            while event is not None:
                event = await self._carry_out(self.flow.handle(event))
        finally:
            self._leave_early()
            self._stop()
            for role in tuple(self._held):
                self._let_go(role)
            self._judge.end()

    def close(self, endpoint: str) -> None:
        """Tell logs and traces how it went; the client has everything, or has left."""
        story = Story(
            request_id=self._call.request_id,
            endpoint=endpoint,
            model=self._call.task.model,
            status=self._client.status,
            path=str(self.flow.path),
            reason=self.flow.reason,
            instances={leg.instance.role: leg.instance.url for leg in self._legs},
            seconds=self._now() - self._call.started_s,
            phases=self.pace.phases if self.pace.decode_s else {},
        )
        story.log()
        self._trace.ended(story.attributes())

    async def _carry_out(self, commands: list[Command]) -> Event | None:
        event = None
        for command in commands:
            event = await ACTIONS[type(command)](self, command)
        return event

    async def count(self, command: Count) -> None:
        self._count(command)

    def _count(self, command: Count) -> None:
        self._services.metrics.count(command)
        if command.what is Counted.UPSTREAM_ERROR:
            leg = next(leg for leg in reversed(self._legs) if leg.instance.role is command.role)
            logger.warning(
                "request %s: the %s leg on %s failed: %s%s",
                self._call.request_id,
                command.role,
                leg.instance.url,
                command.reason,
                leg.trouble,
                extra={"request_id": self._call.request_id},
            )

    async def pick(self, command: Pick) -> Event:
        if command.role is Role.PREFILL:
            self._leave_early()
        self._let_go(command.role)
        decode = self._held.get(Role.DECODE)
        partners = (decode.instance,) if command.role is Role.PREFILL and decode else ()
        wanted = Wanted(command.role, self._call.task, command.excluded, partners)
        found = self._services.membership.reserve(wanted)
        if isinstance(found, Reservation):
            self._held[command.role] = found
            self._judge.chosen(found.instance, partners)
            return Picked(found.instance, self._may_be_early(found.instance))
        match found:
            case Skip(reason, detail):
                return Skipped(reason, detail)
            case Busy(reason, retry_after_s):
                return TurnedAway(reason, retry_after_s)
            case _:
                return NobodyPicked()

    async def send(self, command: Send) -> Event:
        role = command.instance.role
        trace, reservation = self._trace.leg_began(command.instance), self._held[role]
        outgoing = self._outgoing(command, trace.headers)
        leg = Leg(self._services, reservation, trace, outgoing, self._patience(role))
        self._legs.append(leg)
        self._judge.sends(reservation, self.flow.path is Path.DISAGGREGATED)
        self.pace.leg_began(role, self._now())
        event = await self._ask(leg)
        self.pace.leg_answered(role, self._now(), leg.head.headers)
        if isinstance(event, Answered | Promised | Opened):
            trace.answered(self.pace.told)
        if not isinstance(event, Promised | Opened):
            trace.ended(outcome_of(event))
        self._judge.hears(event, leg.head.headers, self.pace.handover_s)
        if isinstance(event, Answered):
            self._answer = (leg.head, event.body)
        if isinstance(event, Opened) and event.can_append:
            self._tell_phases(command.instance)
        if isinstance(event, Promised):
            self._let_compute(leg)
        elif role is Role.PREFILL:
            self._let_go(Role.PREFILL)
        return event

    async def release(self, command: Release) -> None:
        self._leave_early()
        self._services.metrics.count_release(command.reason)
        headers = prefill_headers(self._call.headers, self._call.request_id)
        outgoing = Outgoing("POST", command.instance.url, RELEASE_PATH, headers, command.body)
        self._services.errands.send(outgoing)

    async def relay(self, command: Relay) -> Event:
        leg = self._legs[-1]
        event = await self._client.unless_left(lambda: self._pass_on(leg), 0.0) or ClientGone()
        leg.trace.ended(outcome_of(event))
        return event

    async def cancel(self, command: Cancel) -> None:
        self._client.status = CLIENT_LEFT
        self._stop()

    async def forward(self, command: Forward) -> None:
        head, body = self._answer
        await self._client.start(head.status, self._response_headers(head))
        await self._client.finish(body)

    async def refuse(self, command: Refuse) -> None:
        body = msgspec.json.encode(command.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if command.retry_after_s:
            headers.append((b"retry-after", str(command.retry_after_s).encode()))
        await self._client.start(command.status, self._response_headers(Head(command.status, headers)))
        await self._client.finish(body)

    async def end_with_error(self, command: EndWithError) -> None:
        self._client.status = BROKEN_OFF
        await self._client.finish_with_error(command.message, command.code, command.reason)

    async def cut(self, command: Cut) -> None:
        """Send nothing: a server closes the connection of an app that returns amid its response."""
        self._client.status = BROKEN_OFF

    async def _pass_on(self, leg: Leg) -> Event:
        await self._client.start(leg.head.status, self._response_headers(leg.head))
        reservation = self._held[Role.DECODE]
        observe = self._services.metrics.inter_token(leg.instance).observe if leg.is_event_stream else None
        while True:
            piece = await leg.piece()
            if isinstance(piece, Failed):
                self._judge.hears(piece, [], 0.0)
                return piece
            if observe is not None:
                self.pace.piece(piece, self._now(), observe, reservation)
            if leg.is_over:
                self._judge.hears(Ended(), [], 0.0)
                await self._client.finish(piece)
                return Ended()
            await self._client.pass_on(piece)

    async def _ask(self, leg: Leg) -> Event:
        """The answer of a leg. What P says when the client has just left is its last word, and not for a next leg."""
        is_prefill = leg.instance.role is Role.PREFILL
        event = await self._client.unless_left(leg.ask, LAST_WORD_S if is_prefill else 0.0)
        if event is None or (is_prefill and self._client.has_left):
            return ClientGone(_kept_by(event))
        return event

    def _may_be_early(self, instance: Instance) -> bool:
        from_tokens = self._services.config.early_from_tokens
        is_long = 0 < from_tokens <= self._call.task.prompt_tokens
        return is_long and instance.role is Role.PREFILL and self._services.membership.has_early_legs(instance)

    def _let_compute(self, leg: Leg) -> None:
        self._services.metrics.count_early()
        self.pace.promised()
        self._early = [EarlyPrefill(leg, self._prefilled)]

    def _prefilled(self, leg: Leg, event: Event) -> None:
        """An early leg has ended by itself."""
        self._early = []
        self.pace.prefilled(self._now())
        leg.trace.ended(outcome_of(event))
        reason = self._judge.hears_end(leg.reservation, event)
        if reason:
            self._count(Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason))
        self._let_go(Role.PREFILL)

    def _leave_early(self) -> None:
        for early in self._early:
            early.close()
        self._early = []

    def _patience(self, role: Role) -> Patience:
        """A decode leg waits for what an early prefill leg has not computed yet."""
        config = self._services.config
        prefill_s = config.prefill_timeout_s if role is Role.PREFILL or self._early else 0.0
        decode_s = config.decode_timeout_s if role is Role.DECODE else 0.0
        return Patience(prefill_s + decode_s, self._call.deadline_s)

    def _stop(self) -> None:
        for leg in self._legs:
            leg.close()

    def _let_go(self, role: Role) -> None:
        reservation = self._held.pop(role, None)
        if reservation is not None:
            reservation.release()

    def _tell_phases(self, decode: Instance) -> None:
        metrics = self._services.metrics
        metrics.observe_first_token(self.flow.path, self._now() - self._call.started_s)
        metrics.observe_phases(self.pace.phases, self._judge.prefill_url, decode.url)

    def _outgoing(self, command: Send, traced: Headers) -> Outgoing:
        select = prefill_headers if command.instance.role is Role.PREFILL else decode_headers
        headers = select(self._call.headers, self._call.request_id)
        if traced:
            headers = [*(pair for pair in headers if pair[0] not in dict(traced)), *traced]
        return Outgoing("POST", command.instance.url, self._call.target, headers, command.body)

    def _response_headers(self, head: Head) -> Headers:
        own = {"x-request-id": self._call.request_id, "x-kvferry-path": str(self.flow.path)}
        own |= {"x-kvferry-reason": self.flow.reason} if self.flow.reason else {}
        own |= {"server-timing": server_timing(self.pace.phases)} if head.status and self.pace.decode_s else {}
        return response_headers(head.headers, own)

    def _now(self) -> float:
        return time.monotonic()


ACTIONS: Mapping[type[Command], Callable[[Driver, Any], Awaitable[Event | None]]] = {
    Cancel: Driver.cancel,
    Count: Driver.count,
    Cut: Driver.cut,
    EndWithError: Driver.end_with_error,
    Forward: Driver.forward,
    Pick: Driver.pick,
    Refuse: Driver.refuse,
    Relay: Driver.relay,
    Release: Driver.release,
    Send: Driver.send,
}


def _kept_by(event: Event | None) -> bytes:
    """The answer of a P that did what it was asked for; else empty."""
    match event:
        case Answered(status, body) if 200 <= status < 300:
            return body
        case _:
            return b""
