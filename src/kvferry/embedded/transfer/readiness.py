"""Whether an engine whose transfers fail should be sent requests: a pure function of what has happened, and when.

It is a circuit breaker. So many failures in a row within a minute open it; a success closes it at once. After a minute
without failures one more request is tried (half-open): its success closes it, its failure opens it for another minute.
"""

from __future__ import annotations

from collections import deque

from kvferry import Reason

# Only these say something about the way between the engines. The others are about one reference, which a client may
# have made up: nobody must be able to close an engine by sending nonsense.
TELLING = frozenset((Reason.UNREACHABLE, Reason.PEER_LOST, Reason.DEADLINE, Reason.TRANSPORT, Reason.DIGEST))


class Readiness:
    """Belongs to one thread. `now` is seconds of any monotonic clock."""

    def __init__(self, num_failures: int = 5, quiet_s: float = 60.0) -> None:
        """Blow after `num_failures` in a row within `quiet_s`."""
        self._quiet_s = quiet_s
        self._failed_at: deque[float] = deque(maxlen=num_failures)
        self._reasons: deque[str] = deque(maxlen=num_failures)
        self._is_blown = False

    def succeeded(self) -> None:
        """A cache has arrived."""
        self._failed_at.clear()
        self._reasons.clear()
        self._is_blown = False

    def failed(self, reason: str, now: float) -> None:
        """A cache has not arrived. Reasons that a client can cause are ignored."""
        if reason not in TELLING:
            return
        self._failed_at.append(now)
        self._reasons.append(reason)
        is_full = len(self._failed_at) == self._failed_at.maxlen
        self._is_blown = self._is_blown or (is_full and now - self._failed_at[0] <= self._quiet_s)

    def problem(self, now: float) -> str:
        """Why no request should be sent here; empty when one may be."""
        if not self._is_blown or now - self._failed_at[-1] >= self._quiet_s:
            return ""
        reasons = ", ".join(sorted(set(self._reasons)))
        return f"the last {len(self._reasons)} transfers failed ({reasons})"
