"""A limit on waiting that counts only time in which the waiter was awake."""

from __future__ import annotations

# Whoever waits asks every millisecond or so. A longer gap means that its thread had no turn: an engine's first steps
# can keep the interpreter for seconds, and that says nothing about who is being waited for.
MOST_GAP_S = 0.05


class AwakeTimeout:
    """`left_s` shrinks by the time between two calls of `spend`, by a twentieth of a second at most each time."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.left_s = limit_s
        self._spent_at = now

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, now: float) -> None:
        """Time has passed; `now` is in seconds of any clock."""
        self.left_s -= min(now - self._spent_at, MOST_GAP_S)
        self._spent_at = now
