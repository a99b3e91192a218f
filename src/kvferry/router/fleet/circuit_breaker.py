"""A circuit breaker, for an instance, for a pair of them or for a kind of requests: pure, on any monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class BreakerState(StrEnum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """A breaker opens after `num_failures` in a row, for `open_s`. A failed trial doubles that, up to `max_open_s`."""

    num_failures: int
    open_s: float
    max_open_s: float


class Trial:
    """The one thing that is let through a half-open breaker; known by its identity."""

    __slots__ = ()


class Breaker:
    """Belongs to one thread. Each `begin` must be followed by `succeeded`, `failed` or `abandoned`. The last two get
    the trial that `begin` may have returned.

    Requests that were under way when it opened may still fail, or be abandoned: only a trial says something new. One
    whose answer has begun (`answers`) may go on for long: after `open_s` another one is let through beside it.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._num_failures = 0
        self._open_s = settings.open_s
        self._closed_again_at: float | None = None
        # The newest one, and all whose end is not known: any of them may fail.
        self._trial: Trial | None = None
        self._trial_until = math.inf
        self._trials: set[Trial] = set()

    def state(self, now: float) -> BreakerState:
        if self._closed_again_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._closed_again_at else BreakerState.HALF_OPEN

    def may_begin(self, now: float) -> bool:
        """Whether something may be sent there now."""
        if self._closed_again_at is None:
            return True
        return now >= self._closed_again_at and (self._trial is None or now >= self._trial_until)

    def begin(self, now: float) -> Trial | None:
        """Note that something is sent there. Return the trial that it is if the breaker is half open, else None."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return None
        self._trial, self._trial_until = Trial(), math.inf
        self._trials.add(self._trial)
        return self._trial

    def answers(self, now: float, trial: Trial | None) -> None:
        """Note that an answer has begun. Whether it is worth anything shows at its end."""
        if trial is not None and trial is self._trial:
            self._trial_until = now + self._settings.open_s

    def succeeded(self) -> None:
        """Note a success: whatever was before is forgotten."""
        self._num_failures, self._closed_again_at = 0, None
        self._open_s = self._settings.open_s
        self._end_trials()

    def failed(self, now: float, trial: Trial | None = None) -> None:
        state = self.state(now)
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and trial not in self._trials):
            return
        self._num_failures += 1
        if state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, self._settings.max_open_s)
        elif self._num_failures < self._settings.num_failures:
            return
        self._closed_again_at = now + self._open_s
        self._end_trials()

    def abandoned(self, trial: Trial | None) -> None:
        """Note an end that tells nothing. If it was that of the newest trial, the next request is one."""
        if trial is not None:
            self._trials.discard(trial)
            self._trial = None if trial is self._trial else self._trial

    def _end_trials(self) -> None:
        self._trial = None
        self._trials.clear()


class BreakerTable(Generic[Key]):
    """A breaker for each key that has failed since it last succeeded. Beyond `max_keys` the oldest is forgotten."""

    def __init__(self, settings: BreakerSettings, max_keys: float = math.inf) -> None:
        self._settings = settings
        self._max_keys = max_keys
        self._breakers: dict[Key, Breaker] = {}
        # Keys whose breaker has opened, so that `not_closed` does not look at those that have failed now and then.
        self._opened: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def state(self, key: Key, now: float) -> BreakerState:
        return self._breakers[key].state(now) if key in self._breakers else BreakerState.CLOSED

    def not_closed(self, now: float) -> list[Key]:
        return [key for key in self._opened if self.state(key, now) is not BreakerState.CLOSED]

    def may_begin(self, key: Key, now: float) -> bool:
        return key not in self._breakers or self._breakers[key].may_begin(now)

    def begin(self, key: Key, now: float) -> Trial | None:
        """Begin something for this key. Return its trial or None. `succeeded`, `failed` or `abandoned` must follow."""
        return self._breakers[key].begin(now) if key in self._breakers else None

    def succeeded(self, key: Key) -> bool:
        """Note a success. Return whether the key had failed before."""
        return self._drop(key)

    def failed(self, key: Key, now: float, trial: Trial | None = None) -> bool:
        """Note a failure. Return whether that opens the key's breaker."""
        if key not in self._breakers and len(self._breakers) >= self._max_keys:
            self._drop(next(iter(self._breakers)))
        breaker = self._breakers.setdefault(key, Breaker(self._settings))
        was_open = breaker.state(now) is BreakerState.OPEN
        breaker.failed(now, trial)
        opens = breaker.state(now) is BreakerState.OPEN and not was_open
        if opens:
            self._opened[key] = None
        return opens

    def abandoned(self, key: Key, trial: Trial | None) -> None:
        if key in self._breakers:
            self._breakers[key].abandoned(trial)

    def forget(self, concerns: Callable[[Key], bool]) -> None:
        """Forget the keys of which this is true."""
        for key in [key for key in self._breakers if concerns(key)]:
            self._drop(key)

    def clear(self) -> None:
        self.forget(lambda _: True)

    def _drop(self, key: Key) -> bool:
        self._opened.pop(key, None)
        return self._breakers.pop(key, None) is not None
