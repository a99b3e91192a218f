"""What the router knows of one instance: pure, on any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.router.fleet.circuit_breaker import Breaker, BreakerSettings
from kvferry.router.fleet.compatibility import NO_FACTS, Facts
from kvferry.router.fleet.prefill_speed import PrefillSpeed
from kvferry.router.policy.records import Instance, Load, RequestCost

INSTANCE_BREAKER = BreakerSettings(num_failures=5, open_s=5.0, max_open_s=60.0)
# A probe that is not answered in time may have met a busy engine; one that is refused has met none.
MAX_MISSED_PROBES = 2


class Origin(StrEnum):
    """Who says that an instance is one of ours; only the same can take it out again."""

    COMMAND_LINE = "command line"
    FILE = "file"
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
    facts: Facts = NO_FACTS
    breaker: Breaker = field(default_factory=lambda: Breaker(INSTANCE_BREAKER))
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)

    def probed(self, result: ProbeResult) -> bool:
        """Take a probe's word; whether that is news, as the first one is in any case."""
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
        return not model or not self.facts.models or model in self.facts.models

    def introduce(self, facts: Facts) -> bool:
        """It says who it is; whether it is another process than before, so that nothing of the old one counts."""
        is_new = bool(self.facts.epoch) and facts.epoch != self.facts.epoch
        self.facts = facts
        if is_new:
            self.breaker.succeeded()
        return is_new

    def load(self, cost: RequestCost, num_cached: int, num_partners: int, now: float) -> Load:
        """What a policy is told; `num_cached` of the prompt's prefixes were sent here before."""
        return Load(
            instance=self.instance,
            healthy=self.can_serve(now),
            num_outstanding=self.num_outstanding,
            last_chosen=self.last_chosen,
            ready=self.ready,
            outstanding_tokens=self.outstanding_tokens,
            tokens_per_s=self.speed.tokens_per_s,
            cached_tokens=num_cached * cost.prefix_tokens if self.facts.has_prefix_cache else 0,
            num_partners=num_partners,
        )
