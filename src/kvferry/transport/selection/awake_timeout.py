"""A timeout that does not count gaps in which the waiting thread did not run."""

from __future__ import annotations

# The waiting thread calls every millisecond or so. A longer gap means that it did not run: an engine's first steps can
# hold the interpreter for seconds, which says nothing about the peer.
MAX_STEP_S = 0.05


class AwakeTimeout:
    """Each call of `advance` takes the time since the last call from `left_s`, at most `MAX_STEP_S`."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.left_s = limit_s
        self._advanced_at = now

    @property
    def is_expired(self) -> bool:
        return self.left_s <= 0

    def advance(self, now: float) -> None:
        """`now` is in seconds of any clock."""
        self.left_s -= min(now - self._advanced_at, MAX_STEP_S)
        self._advanced_at = now
