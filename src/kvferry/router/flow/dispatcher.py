"""The prefill and decode requests that one client's request is made of: sent to reserved instances, timed, traced."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvferry.kv_transfer_params import MAX_ROOM
from kvferry.router.answers.answer_format import ANSWER_FORMATS
from kvferry.router.commands import Count, Counted, Pick, Send, Start
from kvferry.router.events import (
    PREFILL_GONE,
    PREFILL_LOST,
    PREFILL_REFUSED,
    Answered,
    ClientGone,
    Ended,
    Event,
    Opened,
    Path,
    Picked,
    Promised,
)
from kvferry.router.fleet.engine_info import Handover
from kvferry.router.fleet.instance import Reservation
from kvferry.router.fleet.rooms import room_between
from kvferry.router.flow.client import Client
from kvferry.router.flow.early_prefill import EarlyPrefill, PrefillUsage
from kvferry.router.flow.outcomes import OutcomeRecorder
from kvferry.router.flow.relay import Relay
from kvferry.router.flow.reservations import Reservations
from kvferry.router.flow.upstream_request import Timeouts, UpstreamRequest
from kvferry.router.policy.records import Instance, Role
from kvferry.router.request.client_request import Call
from kvferry.router.request.headers import Headers, decode_headers, prefill_headers, with_length
from kvferry.router.request.request_kind import kind_of
from kvferry.router.services import Services
from kvferry.router.telemetry.access_log import outcome_of
from kvferry.router.telemetry.request_timing import RequestTiming
from kvferry.router.upstream.failures import GONE
from kvferry.router.upstream.http_client import HttpRequest, WholeResponse

# How long P's answer is waited for after the client has left. It may be on its way, and its blocks have to be released.
# Much longer, and P would compute in vain.
LAST_ANSWER_S = 0.2

logger = logging.getLogger(__name__)


class Dispatcher:
    """Sends the engine requests of one call: one is in flight, and a prefill may be beside it. `close` ends them all.

    `answer` is the last one that came whole.
    """

    def __init__(self, services: Services, call: Call, client: Client) -> None:
        self.timing = RequestTiming(call.started_s)
        self.trace = services.tracing.begin(call.headers, call.request_id)
        self.answer = WholeResponse(0, [], b"")
        self._services = services
        self._call = call
        self._client = client
        self._outcomes = OutcomeRecorder(
            services.pool, call.cost, kind_of(call.request, call.cost), call.request.streams
        )
        self._reserved = Reservations(self._outcomes, call.cost, services.pool.reserve)
        # All requests so far. The last one is in flight.
        self._sent: list[UpstreamRequest] = []
        self._usage = PrefillUsage()
        self._format = ANSWER_FORMATS[call.request.endpoint]

    @property
    def urls(self) -> Mapping[Role, str]:
        """The instance that was asked last of each role."""
        return {request.instance.role: request.instance.url for request in self._sent}

    @property
    def in_flight(self) -> UpstreamRequest:
        return self._sent[-1]

    def pick(self, command: Pick) -> Event:
        """Reserve an instance."""
        if command.role is Role.PREFILL:
            self.leave_early()
        found = self._reserved.pick(command)
        return self._picked(*found) if isinstance(found, tuple) else found

    def start(self, command: Start) -> None:
        """Send a prefill request beside the decode request that follows: the two meet in a room."""
        request = self._upstream_request(command)
        self._sent.append(request)
        self._outcomes.sends(request.reservation, divided=True)
        now = time.monotonic()
        self.timing.began(Role.PREFILL, now)
        self.timing.answered(Role.PREFILL, now, [])
        self.timing.promised()
        self._usage.cached_tokens = None
        waits = self._services.pool.info_of(command.instance).handover is Handover.ROOM
        hears = self._outcomes.hears_end_of_reading if waits else self._outcomes.hears_end_in_room
        ended = partial(self._early_ended, hears)
        self._usage.early = EarlyPrefill(request, request.run, ended)

    async def send(self, command: Send, path: Path) -> Event:
        """Send a request to the instance that was picked for it."""
        role = command.instance.role
        if path is Path.DECODE_ONLY:
            # A prefill that is left over in a room fails there, which must not end this request.
            self.leave_early()
            self._reserved.release(Role.PREFILL)
        request = self._upstream_request(command)
        self._sent.append(request)
        self._outcomes.sends(request.reservation, path is Path.DISAGGREGATED)
        self.timing.began(role, time.monotonic())
        event = await self._answer_to(request)
        self.timing.answered(role, time.monotonic(), request.headers)
        self._tell(request, event)
        if role is Role.PREFILL:
            body = event.body if isinstance(event, Answered) else b""
            self._usage.cached_tokens = self._format.cached_tokens_of(body)
            if not isinstance(event, Promised):
                self._reserved.release(Role.PREFILL)
        match event:
            case Answered():
                self.answer = _whole(request, event)
            case Opened():
                self._opened(event, path, command.instance)
            case Promised():
                self._services.metrics.early_decodes.inc()
                self.timing.promised()
                self._usage.early = EarlyPrefill(
                    request, request.rest, partial(self._early_ended, self._outcomes.hears_end)
                )
        return event

    async def relay(self, headers: Headers) -> Event:
        """Pass the opened answer on to the client."""
        request = self.in_flight
        observer_of, url = self._services.metrics.observer_of_gaps, request.instance.url
        # An answer in one piece has no time between tokens, and makes no series of them.
        observe = observer_of(url) if request.is_event_stream else _unobserved
        on_tokens = partial(self.timing.piece, observe=observe, progress=request.reservation.progress)
        relay = Relay(request, self._client, self._outcomes, self._usage, self._format, on_tokens)
        work = partial(relay.run, headers, self._services.config.max_answer_bytes)
        event = await self._client.unless_left(work, 0.0) or relay.left()
        request.trace.ended(outcome_of(event))
        return event

    def count(self, command: Count) -> None:
        """Carry out a count. A failed request is logged as well."""
        self._services.metrics.count(command)
        if command.what is Counted.UPSTREAM_ERROR:
            request = next(one for one in reversed(self._sent) if one.instance.role is command.role)
            self._services.metrics.instance_error(request.instance, command.reason)
            # A request that the router itself has ended has no trouble of its own to tell.
            trouble = "" if command.reason in (PREFILL_LOST, PREFILL_GONE) else request.trouble
            logger.warning(
                "request %s: the %s request to %s failed: %s%s",
                *(self._call.request_id, command.role, request.instance.url, command.reason, trouble),
                extra={"request_id": self._call.request_id},
            )

    def leave_early(self) -> None:
        """Leave an early prefill, if there is one: what it still computes is not wanted any more."""
        if self._usage.early is not None:
            self._usage.early.close()
        self._usage.early = None

    def stop(self) -> None:
        """Close all connections that something may still come on."""
        self.leave_early()
        for request in self._sent:
            request.close()

    def close(self) -> None:
        """End everything: the request is over, in whatever way."""
        self.stop()
        self._reserved.release(*Role)
        self._outcomes.end()

    async def _answer_to(self, request: UpstreamRequest) -> Event:
        """Wait for an answer. If the client has left, return `ClientGone`, with what P has answered if P was asked."""
        is_prefill = request.instance.role is Role.PREFILL
        event = await self._client.unless_left(request.ask, LAST_ANSWER_S if is_prefill else 0.0)
        if event is None or (is_prefill and self._client.has_left):
            return ClientGone(event if isinstance(event, Answered | Promised) else None)
        return event

    def _tell(self, request: UpstreamRequest, event: Event) -> None:
        if isinstance(event, Answered | Promised | Opened):
            request.trace.answered(self.timing.told)
        if not isinstance(event, Promised | Opened):
            request.trace.ended(outcome_of(event))
        self._outcomes.hears(event, request.headers, self.timing.handover_s)

    def _picked(self, instance: Instance, partners: tuple[Instance, ...]) -> Picked:
        """What a chosen instance can do, and how its request is to begin."""
        info = self._services.pool.info_of(instance)
        if instance.role is Role.DECODE or not partners:
            return Picked(instance, computes=info.computes_prompts)
        from_tokens = self._services.config.early_from_tokens
        is_long = 0 < from_tokens <= self._call.cost.prompt_tokens
        # Another room for every try: an engine may still be busy with what was asked before.
        number = 1 + secrets.randbelow(MAX_ROOM)
        room = room_between(instance, info, self._services.pool.info_of(partners[0]), number)
        is_early = is_long and info.early and self._call.request.dialect.can_be_early
        return Picked(instance, is_early=is_early, room=room)

    def _early_ended(self, hears: Callable[[Reservation, Event], str], request: UpstreamRequest, event: Event) -> None:
        """Take the end of a prefill beside decode. If it has failed, decode is ended before it finds that out."""
        self._usage.early = None
        if isinstance(event, Ended):
            self._usage.cached_tokens = request.cached_tokens
            self.timing.prefilled(time.monotonic())
        request.trace.ended(outcome_of(event))
        reason = hears(request.reservation, event)
        if reason == PREFILL_REFUSED and isinstance(event, Answered):
            self.answer = _whole(request, event)
            self.in_flight.give_up(PREFILL_REFUSED)
        elif reason:
            self.count(Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason))
            self.in_flight.give_up(PREFILL_GONE if reason in GONE else PREFILL_LOST)
        self._reserved.release(Role.PREFILL)

    def _upstream_request(self, command: Send | Start) -> UpstreamRequest:
        role, url = command.instance.role, command.instance.url
        trace = self.trace.upstream_began(command.instance)
        select = prefill_headers if role is Role.PREFILL else decode_headers
        traced = dict(trace.headers)
        headers = select(self._call.headers, self._call.request_id)
        headers = [*(pair for pair in headers if pair[0] not in traced), *traced.items()]
        http = HttpRequest("POST", url, self._call.target, headers, command.body)
        timeouts = self._timeouts(command)
        return UpstreamRequest(self._services, self._reserved[role], trace, http, timeouts, self._format)

    def _timeouts(self, command: Send | Start) -> Timeouts:
        """The limits of a request. Decode waits for the rest of an early prefill, a prefill in a room for decode."""
        config, role = self._services.config, command.instance.role
        prefill_s = config.prefill_timeout_s if role is Role.PREFILL or self._usage.early else 0.0
        decode_s = config.decode_timeout_s if role is Role.DECODE or isinstance(command, Start) else 0.0
        return Timeouts(prefill_s + decode_s, self._call.deadline_s)

    def _opened(self, event: Opened, path: Path, decode: Instance) -> None:
        """Note that an answer has begun. An early prefill whose cache has come is done, even if it has not answered."""
        if self._usage.early is not None and self._outcomes.has_arrived:
            self._outcomes.hears_end(self._usage.early.request.reservation, Ended())
        metrics, phases = self._services.metrics, self.timing.phases
        if event.can_append:
            metrics.time_to_first_token.labels(path).observe(time.monotonic() - self._call.started_s)
        else:
            # Without streaming the first byte comes after the last token: that would spoil the figure of first tokens.
            phases["decode"] = phases.pop("first_decode")
        metrics.observe_phases(phases, self._outcomes.prefill_url, decode.url)


def _whole(request: UpstreamRequest, answered: Answered) -> WholeResponse:
    """An answer to pass on. The error of a stream that has failed at once is one in one piece."""
    headers = request.headers
    if request.is_event_stream:
        kept = [pair for pair in headers if pair[0].lower() not in (b"content-type", b"content-length")]
        headers = with_length([*kept, (b"content-type", b"application/json")], len(answered.body))
    return WholeResponse(answered.status, headers, answered.body)


def _unobserved(_: float) -> None:
    """Ignore the time between tokens of an answer that comes in one piece."""
