"""The legs of one request: instances are picked, legs are sent to them, timed, traced and judged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kvferry.router.events import (
    PREFILL_FAILS,
    PREFILL_LOST,
    Answered,
    ClientGone,
    Count,
    Counted,
    Ended,
    Event,
    Failed,
    Opened,
    Path,
    Pick,
    Picked,
    Promised,
    Send,
)
from kvferry.router.fleet.membership import InstanceRequest
from kvferry.router.fleet.request_kinds import kind_of
from kvferry.router.fleet.reservation import Reservation
from kvferry.router.flow.client import Client
from kvferry.router.flow.early_prefill import EarlyPrefill
from kvferry.router.flow.leg import Head, Leg, LegTimeouts
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.flow.request_timing import RequestTiming
from kvferry.router.flow.usage import (
    UsageEvents,
    before_final_usage,
    cached_tokens_of,
    tells_usage,
    with_cached_tokens,
    with_cached_tokens_in_events,
)
from kvferry.router.policy.records import Instance, Role, SkipPrefill
from kvferry.router.request.call import Call
from kvferry.router.request.headers import Headers, decode_headers, prefill_headers, with_length
from kvferry.router.services import Services
from kvferry.router.telemetry.access_log import outcome_of
from kvferry.router.upstream.http_client import UpstreamRequest

# P may have answered in the moment in which the client left: its word is on its way, and keeps blocks for nobody. Much
# longer, and P would compute in vain.
LAST_WORD_S = 0.2
# An early P tells at its end what it had cached, and D may have answered by then. Its prompt is computed: that is near.
LAST_USAGE_S = 1.0

logger = logging.getLogger(__name__)


class Dispatcher:
    """One leg is in flight at a time, and an early prefill leg may be beside it. `close` ends them all.

    `answer` is the last one that came whole.
    """

    def __init__(self, services: Services, call: Call, client: Client) -> None:
        self.timing = RequestTiming(call.started_s)
        self.trace = services.tracing.begin(call.headers, call.request_id)
        self.answer = (Head(0, []), b"")
        self._services = services
        self._call = call
        self._client = client
        self._outcomes = OutcomeRecorder(
            services.membership, call.cost, kind_of(call.request, call.cost), call.request.streams
        )
        self._held: dict[Role, Reservation] = {}
        # All so far; the last one is in flight.
        self._sent: list[Leg] = []
        self._early: list[EarlyPrefill] = []
        # What the prefill engine had cached of the prompt, if it has told.
        self._cached_tokens: int | None = None

    @property
    def urls(self) -> Mapping[Role, str]:
        """The instances of the last leg of each role."""
        return {leg.instance.role: leg.instance.url for leg in self._sent}

    @property
    def head(self) -> Head:
        """What the leg in flight was answered."""
        return self._sent[-1].head

    def pick(self, command: Pick) -> Event:
        """Reserve an instance."""
        if command.role is Role.PREFILL:
            self.leave_early()
            if not self._outcomes.may_prefill():
                return SkipPrefill(PREFILL_FAILS)
        self._let_go(command.role)
        decode = self._held.get(Role.DECODE)
        partners = (decode.instance,) if command.role is Role.PREFILL and decode else ()
        wanted = InstanceRequest(command.role, self._call.cost, command.excluded, partners)
        found = self._services.membership.reserve(wanted)
        if isinstance(found, Reservation):
            self._held[command.role] = found
            self._outcomes.chosen(found.instance, partners)
            return Picked(found.instance, self._may_be_early(found.instance))
        return found

    async def send(self, command: Send, path: Path) -> Event:
        """Send a leg to the instance that was picked for it."""
        role = command.instance.role
        trace, reservation = self.trace.leg_began(command.instance), self._held[role]
        leg = Leg(self._services, reservation, trace, self._request(command, trace.headers), self._timeouts(role))
        self._sent.append(leg)
        self._outcomes.sends(reservation, path is Path.DISAGGREGATED)
        self.timing.leg_began(role, _now())
        event = await self._ask(leg)
        self.timing.leg_answered(role, _now(), leg.head.headers)
        if isinstance(event, Answered | Promised | Opened):
            trace.answered(self.timing.told)
        if not isinstance(event, Promised | Opened):
            trace.ended(outcome_of(event))
        self._outcomes.hears(event, leg.head.headers, self.timing.handover_s)
        if isinstance(event, Answered):
            self.answer = (leg.head, event.body)
        if role is Role.PREFILL:
            self._cached_tokens = cached_tokens_of(event.body) if isinstance(event, Answered) else None
        if isinstance(event, Opened):
            self._take_note(event, path, command.instance)
        if isinstance(event, Promised):
            self._let_compute(leg)
        elif role is Role.PREFILL:
            self._let_go(Role.PREFILL)
        return event

    async def relay(self, headers: Headers) -> Event:
        """Pass the opened answer on to the client."""
        leg = self._sent[-1]
        event = await self._client.unless_left(lambda: self._pass_on(leg, headers), 0.0) or ClientGone()
        leg.trace.ended(outcome_of(event))
        return event

    def count(self, command: Count) -> None:
        """Count; what failed is logged as well."""
        self._services.metrics.count(command)
        if command.what is Counted.UPSTREAM_ERROR:
            leg = next(leg for leg in reversed(self._sent) if leg.instance.role is command.role)
            logger.warning(
                "request %s: the %s leg on %s failed: %s%s",
                self._call.request_id,
                command.role,
                leg.instance.url,
                command.reason,
                # It was ended by us, for that reason.
                "" if command.reason == PREFILL_LOST else leg.trouble,
                extra={"request_id": self._call.request_id},
            )

    def leave_early(self) -> None:
        """What an early prefill leg still computes is not wanted any more."""
        for early in self._early:
            early.close()
        self._early = []

    def stop(self) -> None:
        """Close all connections that something may still come on."""
        self.leave_early()
        for leg in self._sent:
            leg.close()

    def close(self) -> None:
        """The request is over, however."""
        self.stop()
        for role in tuple(self._held):
            self._let_go(role)
        self._outcomes.end()

    async def _ask(self, leg: Leg) -> Event:
        """The answer of a leg. What P says when the client has just left is its last word, and not for a next leg."""
        is_prefill = leg.instance.role is Role.PREFILL
        event = await self._client.unless_left(leg.ask, LAST_WORD_S if is_prefill else 0.0)
        if event is None or (is_prefill and self._client.has_left):
            return ClientGone(_kept_by(event))
        return event

    async def _pass_on(self, leg: Leg, headers: Headers) -> Event:
        if leg.is_event_stream:
            await self._client.start(leg.head.status, headers)
            return await self._pass_on_events(leg)
        if self._outcomes.has_arrived and leg.is_plain_json:
            return await self._pass_on_whole(leg, headers)
        await self._client.start(leg.head.status, headers)
        return await self._pass_on_rest(leg)

    async def _pass_on_whole(self, leg: Leg, headers: Headers) -> Event:
        """An answer whose usage is known at its end. One that is too long to be kept here passes as it is."""
        found, piece = bytearray(), await leg.piece()
        while (
            not isinstance(piece, Failed) and not leg.is_over and len(found) <= self._services.config.max_answer_bytes
        ):
            found += piece
            piece = await leg.piece()
        if not isinstance(piece, Failed) and leg.is_over:
            self._outcomes.hears(Ended(), [], 0.0)
            found += piece
            if tells_usage(found):
                await self._until_prefill_has_told()
            whole = with_cached_tokens(bytes(found), self._cached_tokens)
            await self._client.start(leg.head.status, with_length(headers, len(whole)))
            await self._client.finish(whole)
            return Ended()
        await self._client.start(leg.head.status, headers)
        if isinstance(piece, Failed):
            self._outcomes.hears(piece, [], 0.0)
            await self._client.pass_on(bytes(found))
            return piece
        await self._client.pass_on(bytes(found + piece))
        return await self._pass_on_rest(leg)

    async def _pass_on_rest(self, leg: Leg) -> Event:
        while True:
            piece = await leg.piece()
            if isinstance(piece, Failed):
                self._outcomes.hears(piece, [], 0.0)
                return piece
            if leg.is_over:
                self._outcomes.hears(Ended(), [], 0.0)
                await self._client.finish(piece)
                return Ended()
            await self._client.pass_on(piece)

    async def _pass_on_events(self, leg: Leg) -> Event:
        observe, reservation = self._services.metrics.inter_token(leg.instance).observe, leg.reservation
        events = UsageEvents() if self._outcomes.has_arrived else None
        while True:
            piece = await leg.piece()
            if isinstance(piece, Failed):
                self._outcomes.hears(piece, [], 0.0)
                if events is not None and (rest := events.rest()):
                    await self._client.pass_on(rest)
                return piece
            self.timing.piece(piece, _now(), observe, reservation)
            if events is not None:
                piece = await self._with_usage(events.feed(piece))
            if leg.is_over:
                self._outcomes.hears(Ended(), [], 0.0)
                await self._client.finish(piece + events.rest() if events is not None else piece)
                return Ended()
            if piece:
                await self._client.pass_on(piece)

    async def _with_usage(self, events: bytes) -> bytes:
        """Whole events with the prefill engine's figure; no token waits for that."""
        if not tells_usage(events):
            return events
        at = before_final_usage(events)
        if self._is_prefill_untold and at < len(events):
            if at:
                await self._client.pass_on(with_cached_tokens_in_events(events[:at], self._cached_tokens))
            await self._until_prefill_has_told()
            events = events[at:]
        return with_cached_tokens_in_events(events, self._cached_tokens)

    @property
    def _is_prefill_untold(self) -> bool:
        return self._cached_tokens is None and bool(self._early)

    async def _until_prefill_has_told(self) -> None:
        if self._is_prefill_untold:
            await self._early[0].until_ended(LAST_USAGE_S)

    def _may_be_early(self, instance: Instance) -> bool:
        from_tokens = self._services.config.early_from_tokens
        is_long = 0 < from_tokens <= self._call.cost.prompt_tokens
        return is_long and instance.role is Role.PREFILL and self._services.membership.has_early_legs(instance)

    def _let_compute(self, leg: Leg) -> None:
        self._services.metrics.count_early()
        self.timing.promised()
        self._early = [EarlyPrefill(leg, self._prefilled)]

    def _prefilled(self, leg: Leg, event: Event) -> None:
        """An early leg has ended by itself. If it has failed, nobody need wait until decode has found that out."""
        self._early = []
        if isinstance(event, Ended):
            self._cached_tokens = leg.cached_tokens
            self.timing.prefilled(_now())
        leg.trace.ended(outcome_of(event))
        if reason := self._outcomes.hears_end(leg.reservation, event):
            self.count(Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason))
            self._sent[-1].give_up(PREFILL_LOST)
        self._let_go(Role.PREFILL)

    def _let_go(self, role: Role) -> None:
        reservation = self._held.pop(role, None)
        if reservation is not None:
            reservation.release()

    def _timeouts(self, role: Role) -> LegTimeouts:
        """A decode leg waits for what an early prefill leg has not computed yet."""
        config = self._services.config
        prefill_s = config.prefill_timeout_s if role is Role.PREFILL or self._early else 0.0
        decode_s = config.decode_timeout_s if role is Role.DECODE else 0.0
        return LegTimeouts(prefill_s + decode_s, self._call.deadline_s)

    def _request(self, command: Send, traced: Headers) -> UpstreamRequest:
        select = prefill_headers if command.instance.role is Role.PREFILL else decode_headers
        headers = select(self._call.headers, self._call.request_id)
        if traced:
            headers = [*(pair for pair in headers if pair[0] not in dict(traced)), *traced]
        return UpstreamRequest("POST", command.instance.url, self._call.target, headers, command.body)

    def _take_note(self, event: Opened, path: Path, decode: Instance) -> None:
        """An answer has begun. Whose cache has come has computed it, though its own answer may still be on its way."""
        for early in self._early if self._outcomes.has_arrived else ():
            self._outcomes.hears_end(early.leg.reservation, Ended())
        metrics, phases = self._services.metrics, self.timing.phases
        if event.can_append:
            metrics.observe_first_token(path, _now() - self._call.started_s)
        else:
            # Without streaming the first byte comes after the last token: that would spoil the figure of first tokens.
            phases["decode"] = phases.pop("first_decode")
        metrics.observe_phases(phases, self._outcomes.prefill_url, decode.url)


def _now() -> float:
    return time.monotonic()


def _kept_by(event: Event | None) -> bytes:
    """The answer of a P that did what it was asked for; else empty."""
    match event:
        case Answered(status, body) if 200 <= status < 300:
            return body
        case _:
            return b""
