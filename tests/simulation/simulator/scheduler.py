"""Virtual time: what happens next, and the random numbers that decide about everything."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Action = Callable[[], None]


class Scheduler:
    """The clock and the queue of what is going to happen. Equal times happen in the order in which they were set."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self._queue: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, time: float, action: Action) -> None:
        """Do something at a time, or now when that is past."""
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do something later."""
        self.at(self.now + delay_s, action)

    def chance(self, likelihood: float) -> bool:
        """Whether something of this likelihood happens."""
        return likelihood > 0 and self.rng.random() < likelihood

    def between(self, low: float, high: float) -> float:
        """A random duration."""
        return low + (high - low) * self.rng.random()

    def run(self, until: float) -> bool:
        """Let everything happen; False when there was still something to do at `until`."""
        while self._queue:
            if self._queue[0][0] > until:
                return False
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return True
