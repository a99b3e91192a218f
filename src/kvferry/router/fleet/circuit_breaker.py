"""A circuit breaker, for an instance or for a pair of them: pure, on any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Blows after `num_failures` in a row, for `open_s`; each trial that fails doubles that, up to `max_open_s`."""

    num_failures: int
    open_s: float
    max_open_s: float


class Trial:
    """The one thing that is let through a half-open breaker; known by its identity."""

    __slots__ = ()


class Breaker:
    """Belongs to one thread. Whoever `begin`s must end it by `succeeded`, `failed` or `abandoned`, and show the trial
    that `begin` may have made of it.

    Requests that were under way when it opened may still fail, or end without a word: only a trial says something new.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._num_failures = 0
        self._open_s = settings.open_s
        self._closed_again_at: float | None = None
        self._trial: Trial | None = None

    def state(self, now: float) -> BreakerState:
        if self._closed_again_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._closed_again_at else BreakerState.HALF_OPEN

    def may_begin(self, now: float) -> bool:
        """Whether something may be sent there now."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def begin(self, now: float) -> Trial | None:
        """Something is sent there; when it is half open this is the trial."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return None
        self._trial = Trial()
        return self._trial

    def succeeded(self) -> None:
        """It works: whatever was before is forgotten."""
        self._num_failures, self._closed_again_at, self._trial = 0, None, None
        self._open_s = self._settings.open_s

    def failed(self, now: float, trial: Trial | None = None) -> None:
        state = self.state(now)
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and not self._is_on(trial)):
            return
        self._num_failures += 1
        if state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, self._settings.max_open_s)
        elif self._num_failures < self._settings.num_failures:
            return
        self._closed_again_at, self._trial = now + self._open_s, None

    def abandoned(self, trial: Trial | None) -> None:
        """It ended without telling anything: if it was the trial, the next one is."""
        if self._is_on(trial):
            self._trial = None

    def _is_on(self, trial: Trial | None) -> bool:
        return trial is not None and trial is self._trial
