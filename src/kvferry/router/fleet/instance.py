"""What the router knows of one instance, and what requests add to that: pure, on any monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvferry.router.fleet.circuit_breaker import Breaker, BreakerSettings
from kvferry.router.fleet.engine_info import UNKNOWN_ENGINE, EngineInfo
from kvferry.router.fleet.prefill_speed import PrefillSpeed
from kvferry.router.policy.records import NO_COST, Instance, Load, RequestCost, Role

INSTANCE_BREAKER = BreakerSettings(num_failures=5, open_s=5.0, max_open_s=60.0)
# A probe that is not answered in time may have met a busy engine; one that is refused has met none.
MAX_MISSED_PROBES = 2


class Origin(StrEnum):
    """Who has added an instance. Only the same one can take it out again."""

    COMMAND_LINE = "command line"
    FILE = "file"
    KUBERNETES = "Kubernetes"
    RAY = "Ray"
    REGISTERED = "registered"


class ProbeResult(StrEnum):
    """What a probe found."""

    READY = "ready"
    UNREADY = "not ready"
    DOWN = "down"
    SILENT = "silent"


@dataclass(slots=True)
class InstanceState:
    """One instance. It is not healthy before a probe has proven it to be.

    `expires_at` is when a registration ends that is not renewed; infinite for the others.
    """

    instance: Instance
    origin: Origin
    expires_at: float
    is_proven: bool = False
    healthy: bool = False
    ready: bool = False
    num_outstanding: int = 0
    outstanding_tokens: int = 0
    last_chosen: int = 0
    num_missed: int = 0
    num_probes: int = 0
    info: EngineInfo = UNKNOWN_ENGINE
    kind: EngineInfo = UNKNOWN_ENGINE
    breaker: Breaker = field(default_factory=lambda: Breaker(INSTANCE_BREAKER))
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)

    def probed(self, result: ProbeResult) -> bool:
        """Take the result of a probe. Return whether it changes anything, as the first one does in any case."""
        before = self.is_proven, self.healthy, self.ready
        self.num_missed = self.num_missed + 1 if result is ProbeResult.SILENT else 0
        if result is not ProbeResult.SILENT or self.num_missed >= MAX_MISSED_PROBES:
            self.healthy = result in (ProbeResult.READY, ProbeResult.UNREADY)
            self.ready = result is ProbeResult.READY
            self.is_proven = True
        return (self.is_proven, self.healthy, self.ready) != before

    def can_serve(self, now: float) -> bool:
        """Whether a request may be sent to it at all."""
        return self.healthy and self.breaker.may_begin(now)

    def serves(self, model: str) -> bool:
        """Whether it has this model, as far as it tells."""
        return not model or not self.info.models or model in self.info.models

    def introduce(self, info: EngineInfo) -> bool:
        """Take what it says of itself. Return whether it is a new process, for which nothing of the old one counts."""
        is_new = bool(self.info.epoch) and info.epoch != self.info.epoch
        self.info, self.kind = info, info.kind
        if is_new:
            self.breaker.succeeded()
        return is_new

    def load(self, cost: RequestCost, num_cached: int, num_partners: int, is_home: bool, now: float) -> Load:
        """What a policy is told of it. `num_cached` of the prompt's prefixes were sent here before."""
        return Load(
            instance=self.instance,
            healthy=self.can_serve(now),
            num_outstanding=self.num_outstanding,
            last_chosen=self.last_chosen,
            ready=self.ready,
            outstanding_tokens=self.outstanding_tokens,
            tokens_per_s=self.speed.tokens_per_s,
            cached_tokens=num_cached * cost.prefix_tokens if self.info.prefix_cache else 0,
            num_partners=num_partners,
            is_home=is_home,
            computes_prompts=self.info.computes_prompts,
        )


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """What a pool is asked for. `partners` is the instance of the other role with which the chosen one must be able to
    exchange a cache. `alone` asks for a decode instance that computes prompts itself, if there is one."""

    role: Role
    cost: RequestCost = NO_COST
    excluded: frozenset[Instance] = frozenset()
    partners: tuple[Instance, ...] = ()
    alone: bool = False


class Reservation:
    """An instance that was chosen for a request: counts the request and its tokens to the instance until `release`, and
    tells the instance's breaker and speed how it went."""

    def __init__(self, state: InstanceState, cost: RequestCost, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._tokens = cost.work(state.instance.role)
        self._prompt_tokens = cost.prompt_tokens
        self._is_open, self._is_judged, self._computes = True, False, False
        state.num_outstanding += 1
        state.outstanding_tokens += self._tokens
        self._trial = state.breaker.begin(clock())

    @property
    def instance(self) -> Instance:
        return self._state.instance

    def is_on(self, state: InstanceState | None) -> bool:
        """Whether that is the state of its instance, and not of one that has come later at the same address."""
        return self._state is state

    def computes(self) -> None:
        """Note that the instance now computes the request's prompt, so that its answer tells how fast it is."""
        self._computes = True
        self._state.speed.began(self._clock())

    def answers(self) -> None:
        """Note the first byte of the answer: the prompt is computed."""
        self._end_computing(self._prompt_tokens)
        self._state.breaker.answers(self._clock(), self._trial)

    def succeeded(self) -> None:
        """Note that the instance has answered to the end."""
        self._end_computing(self._prompt_tokens)
        self._is_judged = True
        self._state.breaker.succeeded()

    def failed(self) -> None:
        """Note that the instance did not answer, by its own fault."""
        self._end_computing(0)
        self._is_judged = True
        self._state.breaker.failed(self._clock(), self._trial)

    def suspected(self) -> None:
        """Note that the instance did not answer. Whose fault that is shows later: `failed` or `acquitted` follows."""
        self._end_computing(0)
        self._is_judged = True

    def acquitted(self) -> None:
        """Note that the instance did not answer, and that nobody can say whose fault that is."""
        self._state.breaker.abandoned(self._trial)

    def progress(self, num_tokens: int) -> None:
        """Take `num_tokens` off the instance's outstanding tokens, since they have been written."""
        done = min(num_tokens, self._tokens)
        self._tokens -= done
        self._state.outstanding_tokens -= done

    def release(self) -> None:
        """Stop counting the request to the instance, since it is over. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_computing(0)
        if not self._is_judged:
            self._state.breaker.abandoned(self._trial)
        self._state.num_outstanding -= 1
        self._state.outstanding_tokens -= self._tokens

    def _end_computing(self, num_tokens: int) -> None:
        if self._computes:
            self._computes = False
            self._state.speed.ended(self._clock(), num_tokens)


class Interruptible(Protocol):
    """A request to an instance from which an answer is still expected."""

    @property
    def instance(self) -> Instance: ...

    def instance_is_down(self) -> None:
        """Take note that its instance does not answer probes. Called at each probe, as long as that is so."""


class OpenRequests:
    """The open requests of each instance. Belongs to the app's event loop."""

    def __init__(self) -> None:
        self._open: dict[Instance, set[Interruptible]] = {}

    def began(self, request: Interruptible) -> None:
        self._open.setdefault(request.instance, set()).add(request)

    def ended(self, request: Interruptible) -> None:
        """Forget a request that has ended. May be called again."""
        requests = self._open.get(request.instance)
        if requests is not None:
            requests.discard(request)
            if not requests:
                del self._open[request.instance]

    def are_on(self, instance: Instance) -> bool:
        return instance in self._open

    def instance_is_down(self, instance: Instance) -> None:
        for request in tuple(self._open.get(instance, ())):
            request.instance_is_down()
