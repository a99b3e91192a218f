"""Tells the pool what the answers to one request say about instances, and about pairs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.http.request_fields import DecodeOnlyReason
from kvferry.router.answers.engine_response import CACHE_REASON, is_recomputed, known_reason, lost_cache
from kvferry.router.events import (
    INSTANCE_DOWN,
    PREFILL_GONE,
    PREFILL_LOST,
    PREFILL_REFUSED,
    TOO_LATE,
    Answered,
    Ended,
    Event,
    Failed,
    Opened,
)
from kvferry.router.fleet.circuit_breaker import Trial
from kvferry.router.fleet.instance import Reservation
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Instance, Pair, RequestCost, Role, pair_of
from kvferry.router.request.headers import Headers
from kvferry.router.request.request_kind import RequestKind
from kvferry.router.upstream.failures import DEADLINE, EXHAUSTED, GONE
from kvferry.wire.messages import Reason

# Failures that do not count against an instance. A probe finds out about it at once, and also when it is back, or the
# client had no more time, or another instance was at fault.
BLAMELESS = GONE | {EXHAUSTED, INSTANCE_DOWN, TOO_LATE, PREFILL_LOST, PREFILL_GONE, PREFILL_REFUSED}
# These lie in the request: with any other pair of engines it would be the same.
OF_THE_REQUEST = frozenset((Reason.WRONG_PROMPT, Reason.UNNAMED_PROMPT, *DecodeOnlyReason))


@dataclass(frozen=True, slots=True)
class UnattributedFailure:
    """An instance whose request failed. `blame` counts that against it, `acquit` says that it tells nothing.

    `is_certain`: it is at fault even if no other instance is asked. An answer with an error, or one that takes too
    long, may be about the request, but a broken connection hardly is.
    """

    instance: Instance
    blame: Callable[[], None]
    acquit: Callable[[], None]
    is_certain: bool = False


class FailureAttribution:
    """Finds out whether the failures of one client's request are the fault of the request or of instances. An instance
    that serves it convicts those that failed before. One that fails as well acquits them all."""

    def __init__(self) -> None:
        self._open: dict[Role, list[UnattributedFailure]] = {}
        self._acquitted: set[Role] = set()

    def add(self, role: Role, suspect: UnattributedFailure) -> None:
        """Take a failed request to an instance."""
        others = self._open.setdefault(role, [])
        if any(other.instance != suspect.instance for other in others):
            self._acquitted.add(role)
        others.append(suspect)
        if role in self._acquitted:
            for other in others:
                other.acquit()
            others.clear()

    def served(self, role: Role) -> None:
        """Blame the instances of this role that have failed: another one has served the request."""
        for suspect in self._open.pop(role, []):
            suspect.blame()

    def end(self, role: Role) -> None:
        """Judge the failures of this role: no other instance of it will be asked."""
        for suspect in self._open.pop(role, []):
            (suspect.blame if suspect.is_certain else suspect.acquit)()


class OutcomeRecorder:
    """Records how one request went. A pair's trial is always ended: one that tells nothing leaves the pair on trial."""

    def __init__(self, pool: InstancePool, cost: RequestCost, kind: RequestKind, streams: bool) -> None:
        self._pool = pool
        self._cost = cost
        self._kind = kind
        self._streams = streams
        self._attribution = FailureAttribution()
        # Whether prefill instances have failed, and none has answered with a cache.
        self._prefill_failed = False
        self._may_prefill = False
        self._kind_trial: Trial | None = None
        self._pair: Pair | None = None
        self._pair_trial: Trial | None = None
        self._reservation: Reservation | None = None
        self._divided = False
        # Whether the answer that has begun is made of a prefill instance's cache.
        self.has_arrived = False

    @property
    def prefill_url(self) -> str:
        """The URL of the prefill instance that computed the prompt; empty when the decode instance did."""
        return self._pair[0].url if self._pair and self._divided else ""

    def may_prefill(self) -> bool:
        """Whether a request of this kind is to have a prefill. If it is, so is a second one: it is the same try."""
        pool = self._pool
        if not self._may_prefill and pool.kinds.may_begin(self._kind, pool.now):
            self._may_prefill = True
            self._kind_trial = pool.kinds.begin(self._kind, pool.now)
        return self._may_prefill

    def chosen(self, instance: Instance, partners: tuple[Instance, ...]) -> None:
        """Note that an instance was reserved, to work with its partner if it has one."""
        self._leave_pair()
        if partners:
            self._pair = pair_of(instance, partners[0])
            self._pair_trial = self._pool.pairs.begin(self._pair, self._pool.now)

    def sends(self, reservation: Reservation, divided: bool) -> None:
        """Note a request that is sent. Who computes a prompt shows its speed, unless only its answer's end is seen."""
        self._reservation, self._divided = reservation, divided
        if reservation.instance.role is Role.DECODE and not divided:
            self._end_prefill()
        if reservation.instance.role is Role.PREFILL or (not divided and self._streams):
            reservation.computes()

    def hears(self, event: Event, headers: Headers, handover_s: float) -> None:
        """Take how a request went. `handover_s` is from a computed prompt to this, 0 where that is not known."""
        reservation = self._reservation
        if reservation is None:
            return
        match event:
            case Opened():
                # Whether the answer is worth anything shows at its end.
                reservation.answers()
                self._attribution.served(reservation.instance.role)
                self._remember(reservation)
                self.has_arrived = self._judge_cache(reservation, headers)
                if self.has_arrived and self._streams and handover_s:
                    self._pool.handover.add(handover_s)
            case Ended():
                reservation.succeeded()
            case Answered(status, body):
                self._judge_answer(reservation, status, body)
            case Failed(reason, _) if reason not in BLAMELESS:
                # An error that the engine tells of itself may be about the request.
                self._suspect(reservation, is_certain=reason != DEADLINE and not event.is_told)

    def hears_end(self, prefill: Reservation, event: Event) -> str:
        """Take how an early prefill ended, whatever decode does. Return the reason if it is at fault, else no text."""
        match event:
            case Ended():
                self._prefilled(prefill)
            case Answered(status, body) if not lost_cache(body):
                if status >= 500:
                    self._suspect(prefill, is_certain=False)
                return f"status_{status}"
            case Failed(reason, _) if reason != TOO_LATE:
                if reason not in BLAMELESS:
                    self._suspect(prefill, is_certain=reason != DEADLINE)
                return reason
        # A cache that nobody waits for any more is not computed to its end.
        return ""

    def hears_end_in_room(self, prefill: Reservation, event: Event) -> str:
        """The same as `hears_end` in a room: a refusal is about the request unless the instance has too much to do."""
        match event:
            case Answered(status, _) if 400 <= status < 500 and status != 429:
                return PREFILL_REFUSED
        return self.hears_end(prefill, event)

    def hears_end_of_reading(self, prefill: Reservation, event: Event) -> str:
        """The same for a prefill that answers when decode has read its cache: an error may be the fault of either, as
        may an answer that does not come."""
        match event:
            case Failed(reason, _) if reason == DEADLINE:
                return reason
            case Answered(status, body) if status >= 500 and self._pair is not None:
                self._judge_divided(self._pair, status, body)
                return f"status_{status}"
        return self.hears_end_in_room(prefill, event)

    def end(self) -> None:
        """End what is open: nothing more will be heard of the request."""
        self._leave_pair()
        self._end_prefill()
        self._attribution.end(Role.DECODE)

    def _end_prefill(self) -> None:
        """Tell now what is known of prefill: no other instance will be asked for it, and the answer may be long."""
        self._attribution.end(Role.PREFILL)
        if self._prefill_failed:
            self._pool.kind_failed(self._kind, self._kind_trial)
        elif self._may_prefill:
            self._pool.kinds.abandoned(self._kind, self._kind_trial)
        self._prefill_failed = self._may_prefill = False

    def _leave_pair(self) -> None:
        if self._pair is not None:
            self._pool.pairs.abandoned(self._pair, self._pair_trial)
        self._pair, self._pair_trial = None, None

    def _judge_answer(self, reservation: Reservation, status: int, body: bytes) -> None:
        is_decode = reservation.instance.role is Role.DECODE
        if status >= 500 and self._divided and self._pair is not None and is_decode:
            self._judge_divided(self._pair, status, body)
        elif status >= 500:
            self._suspect(reservation, is_certain=False)
        elif 200 <= status < 300:
            self._prefilled(reservation)

    def _judge_divided(self, pair: Pair, status: int, body: bytes) -> None:
        """Judge an error of one of a pair. Engines that are not kvferry's do not say if no cache came. One that is at
        fault every time is soon in no pair any more, and is then judged by what it does alone."""
        if reason := lost_cache(body):
            self._lost(pair, reason)
            return
        pool, trial = self._pool, self._pair_trial
        self._pair, self._pair_trial = None, None
        suspect = UnattributedFailure(
            pair[1],
            blame=lambda: pool.lost(pair, f"status_{status}", trial),
            acquit=lambda: pool.pairs.abandoned(pair, trial),
        )
        self._attribution.add(Role.DECODE, suspect)

    def _suspect(self, reservation: Reservation, *, is_certain: bool) -> None:
        """Note a failure that may be the request's fault: another instance may answer it with an error as well, or take
        too long."""
        reservation.suspected()
        role = reservation.instance.role
        suspect = UnattributedFailure(reservation.instance, reservation.failed, reservation.acquitted, is_certain)
        self._attribution.add(role, suspect)
        self._prefill_failed |= role is Role.PREFILL

    def _prefilled(self, reservation: Reservation) -> None:
        reservation.succeeded()
        self._remember(reservation)
        self._attribution.served(reservation.instance.role)
        self._pool.kinds.succeeded(self._kind)
        self._prefill_failed = False

    def _lost(self, pair: Pair, reason: str) -> None:
        """Note that a cache has not come. Where the reason lies in the request, the pair is not to blame."""
        if reason in OF_THE_REQUEST:
            self._pool.count_lost(pair, reason)
        else:
            self._pool.lost(pair, reason, self._pair_trial)

    def _remember(self, reservation: Reservation) -> None:
        """Note that an instance has the prompt cached from now on."""
        self._pool.remember(reservation, self._cost.prefixes)

    def _judge_cache(self, reservation: Reservation, headers: Headers) -> bool:
        """Whether a cache has come. Engines that are not kvferry's do not say: their answer counts as a yes."""
        if reservation.instance.role is not Role.DECODE or not self._divided or self._pair is None:
            return False
        if is_recomputed(headers):
            reasons = [value for name, value in headers if name.lower() == CACHE_REASON]
            self._lost(self._pair, known_reason(b"".join(reasons).decode("latin-1")))
            return False
        self._pool.arrived(self._pair)
        return True
