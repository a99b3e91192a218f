"""A fleet and what it is asked for: plain records. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvferry.bench.report.slo import Slo
from kvferry.errors import ConfigurationError
from kvferry.router.config import PrefillFallback
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import NO_LIMITS, Limits, Policy
from kvferry.session.timing import Timing
from kvferry.simulate.costs import CacheSize, EngineCosts
from kvferry.simulate.incidents import Incident, check

MAX_ENGINES = 20_000
MAX_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of both roles in racks of `per_rack`; each rack has the same mix, as far as numbers allow. Without
    prefill engines each of the others serves whole requests."""

    num_prefill: int
    num_decode: int
    per_rack: int = 16

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1 or self.num_engines > MAX_ENGINES or self.per_rack < 1:
            raise ConfigurationError(
                "this is no fleet",
                found=f"{self.num_prefill} prefill and {self.num_decode} decode engines, {self.per_rack} in a rack",
                expected=f"a decode engine, at most {MAX_ENGINES:,} engines, and at least one in a rack",
            )

    @property
    def num_engines(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def num_racks(self) -> int:
        return -(-self.num_engines // self.per_rack)

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


@dataclass(frozen=True, slots=True)
class Wires:
    """Rates in bytes/s. `uplink_bytes_per_s` is each direction of a rack's uplink; 0: the sum of its engines' links.
    Raises ConfigurationError."""

    cache: CacheSize
    link_bytes_per_s: float = 50e9
    uplink_bytes_per_s: float = 0.0
    handover_s: float = 0.01

    def __post_init__(self) -> None:
        for rate in (self.link_bytes_per_s, self.uplink_bytes_per_s or self.link_bytes_per_s):
            if not 1 <= rate <= MAX_BYTES_PER_S:
                expected = f"from 1 to {MAX_BYTES_PER_S:g} bytes/s"
                raise ConfigurationError("no link has this rate", found=f"{rate:g} bytes/s", expected=expected)


@dataclass(frozen=True, slots=True)
class Times:
    """How long engines take to start, and at most to drain, of which `notice_s` are for the router to notice; how long
    a peer may be silent that a cache comes from; what comes before `warm_up_s` is served and not counted."""

    start_up_s: float = 30.0
    drain_s: float = 30.0
    notice_s: float = 3.0
    silence_s: float = Timing().silence_s
    warm_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's own settings."""

    policy: Policy = balanced
    limits: Limits = NO_LIMITS
    fallback: PrefillFallback = PrefillFallback.DECODE


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet, what its engines and wires cost, and what happens to it. Raises ConfigurationError."""

    fleet: Fleet
    costs: EngineCosts
    wires: Wires
    slo: Slo
    duration_s: float
    incidents: tuple[Incident, ...] = ()
    times: Times = field(default_factory=Times)
    routing: Routing = field(default_factory=Routing)

    def __post_init__(self) -> None:
        check(self.incidents, self.fleet.num_racks, self.duration_s)
        if not 0 <= self.times.warm_up_s < self.duration_s:
            found, expected = f"{self.times.warm_up_s:g} s", f"from 0 to less than {self.duration_s:g} s"
            raise ConfigurationError("the warm-up leaves nothing to count", found=found, expected=expected)

    @property
    def slow_s(self) -> float:
        """The wanted time between tokens: a longer step is slow."""
        return self.slo.itl_s if math.isfinite(self.slo.itl_s) else math.inf
