"""Between which prefill and decode instances caches arrive: pure, on any monotonic clock."""

from __future__ import annotations

from kvferry.router.fleet.circuit_breaker import Breaker, BreakerSettings, BreakerState, Trial
from kvferry.router.policy.records import Instance, Pair


class Pairs:
    """A breaker for each pair of (prefill, decode) of which something is known.

    A transfer that keeps failing between two of them says nothing about either with anybody else.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._breakers: dict[Pair, Breaker] = {}

    def may_begin(self, pair: Pair, now: float) -> bool:
        breaker = self._breakers.get(pair)
        return breaker is None or breaker.may_begin(now)

    def begin(self, pair: Pair, now: float) -> Trial | None:
        """A request is given to this pair; `succeeded`, `failed` or `abandoned` follows."""
        return self._breakers[pair].begin(now) if pair in self._breakers else None

    def succeeded(self, pair: Pair) -> bool:
        """A cache has arrived. Whether that mends the pair."""
        return self._breakers.pop(pair, None) is not None

    def failed(self, pair: Pair, now: float, trial: Trial | None = None) -> bool:
        """A cache has not arrived. Whether that takes the pair out."""
        breaker = self._breakers.setdefault(pair, Breaker(self._settings))
        was_open = breaker.state(now) is BreakerState.OPEN
        breaker.failed(now, trial)
        return breaker.state(now) is BreakerState.OPEN and not was_open

    def abandoned(self, pair: Pair, trial: Trial | None) -> None:
        """The request ended before anybody could tell."""
        if pair in self._breakers:
            self._breakers[pair].abandoned(trial)

    def state(self, pair: Pair, now: float) -> BreakerState:
        breaker = self._breakers.get(pair)
        return BreakerState.CLOSED if breaker is None else breaker.state(now)

    def broken(self, now: float) -> list[Pair]:
        """Those that are out, or on trial."""
        return [pair for pair, breaker in self._breakers.items() if breaker.state(now) is not BreakerState.CLOSED]

    def forget(self, instance: Instance) -> None:
        """It has left, or is another process now."""
        for pair in [pair for pair in self._breakers if instance in pair]:
            del self._breakers[pair]
