"""What waits for a node: it handles things at once, or when it wakes up again after having been stopped."""

from __future__ import annotations

from collections.abc import Callable

from simulator.scheduler import Scheduler


class Inbox:
    """Frames have rank 0, the engine's calls 1, the transport's news 2, time 3: the order of an agent's turn."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._stopped_until = 0.0
        self._closed = False
        self.stopped_s = 0.0

    def put(self, rank: int, action: Callable[[], None]) -> None:
        """Handle something as soon as the node runs."""
        if self._closed:
            return
        if self._scheduler.now < self._stopped_until:
            self._waiting.append((rank, action))
        else:
            action()

    def stop(self, duration_s: float) -> None:
        """The process does nothing for a while; what arrives meanwhile waits."""
        until = max(self._stopped_until, self._scheduler.now + duration_s)
        self.stopped_s += until - max(self._stopped_until, self._scheduler.now)
        self._stopped_until = until
        self._scheduler.at(until, self._wake)

    def close(self) -> None:
        """The process is gone."""
        self._closed = True
        self._waiting.clear()

    def _wake(self) -> None:
        if self._scheduler.now < self._stopped_until:
            return
        waiting, self._waiting = self._waiting, []
        for rank, action in sorted(waiting, key=lambda entry: entry[0]):
            self.put(rank, action)
