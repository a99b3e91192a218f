"""When to probe which instance: each at a time of its own, so that thousands are not asked at once."""

from __future__ import annotations

import asyncio
import math
from heapq import heappop, heappush
from itertools import count

from kvferry.router.policy.records import Instance

AT_ONCE = -math.inf
"""When an instance is due that is to be probed before all others."""


class ProbeRequests:
    """Instances that are to be probed whatever their time: those that are new, or whose requests fail."""

    def __init__(self) -> None:
        self.are_there = asyncio.Event()
        # A dictionary, since it keeps their order.
        self._instances: dict[Instance, None] = {}
        self._concern_all = False

    def add(self, instance: Instance) -> None:
        self._instances[instance] = None
        self.are_there.set()

    def add_all(self) -> None:
        """Have all instances probed: what has ended one, such as the end of its host, may have ended others."""
        self._concern_all = True
        self.are_there.set()

    def take(self) -> tuple[tuple[Instance, ...], bool]:
        """Return the instances to probe before all others, in order, and whether to probe all. Forget both."""
        taken = tuple(self._instances), self._concern_all
        self._instances.clear()
        self._concern_all = False
        self.are_there.clear()
        return taken


class ProbeSchedule:
    """When each instance is due: the earliest of the times that were put. Pure, on any monotonic clock."""

    def __init__(self) -> None:
        self._due_s: dict[Instance, float] = {}
        # It may hold outdated, later times as well. The number keeps the order of those that are due together.
        self._heap: list[tuple[float, int, Instance]] = []
        self._numbers = count()

    @property
    def next_s(self) -> float:
        """The earliest time at which an instance may be due, infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def put(self, instance: Instance, due_s: float) -> None:
        if due_s < self._due_s.get(instance, math.inf):
            self._due_s[instance] = due_s
            heappush(self._heap, (due_s, next(self._numbers), instance))

    def take(self, now: float, at_most: int) -> list[Instance]:
        """Take out at most `at_most` instances that are due, and return them, the one that has waited longest first."""
        taken: list[Instance] = []
        while self.next_s <= now and len(taken) < at_most:
            due_s, _, instance = heappop(self._heap)
            if self._due_s.get(instance) == due_s:
                del self._due_s[instance]
                taken.append(instance)
        return taken
