"""An engine: prompts that are computed in chunks, answers that are written in a batch.

Steps that are alike are one event, whatever their number: as long as no work comes or ends, a step is like the one
before it. Work that comes amid a step waits for its end. That changes nothing of what a step computes and takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import Instance
from kvferry.simulate.costs import EngineCosts
from kvferry.simulate.fleet.work import EngineState, Work
from kvferry.simulate.load import PREFIX_TOKENS


@dataclass(slots=True)
class Steps:
    """Steps that are alike: the `parts` of prompts that each computes."""

    began_s: float
    step_s: float
    number: int
    parts: tuple[tuple[Work, int], ...]


class Engine:
    """Belongs to one environment. A gap between two tokens of an answer that is longer than `slow_s` counts as slow.
    `position` is where the engine stands among those of its role, from 0 to 1. `num_stops` says how often it was
    stopped."""

    def __init__(self, env: simpy.Environment, instance: Instance, costs: EngineCosts, slow_s: float) -> None:
        self.instance, self.position, self.rack = instance, 0.0, 0
        self.state, self.epoch, self.num_stops = EngineState.READY, 1, 0
        self._busy_s = 0.0
        self._env, self._costs, self._slow_s = env, costs, slow_s
        self._prompts: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._answers: list[tuple[int, int, Work]] = []
        self.serials = itertools.count()
        self._num_steps = self._context_tokens = self._num_kept = 0
        # Work whose first token the next step writes.
        self._joined: list[Work] = []
        self._steps: Steps | None = None
        self._event: simpy.Event | None = None
        self._idle: simpy.Event | None = None
        num_prefixes = max(costs.cache_tokens // PREFIX_TOKENS, 1)
        self._cached = PrefixIndex(num_prefixes, num_prefixes)

    @property
    def serves(self) -> bool:
        return self.state in (EngineState.READY, EngineState.DRAINING)

    @property
    def busy_s(self) -> float:
        """How long it has computed so far."""
        return self._busy_s + (self._env.now - self._steps.began_s if self._steps else 0.0)

    @property
    def num_waiting(self) -> int:
        """Prompts that are not computed, and answers that no step writes."""
        return len(self._prompts) + len(self._waiting)

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def used_share(self) -> float:
        """The used share of the places for answers, or of the cache's tokens, whichever is scarcer."""
        return max(len(self._answers) / self._costs.max_answers, self._context_tokens / self._costs.cache_tokens)

    def num_cached(self, prefixes: Sequence[int]) -> int:
        """How many of the prefixes it has cached."""
        return self._cached.num_known(self.instance, prefixes)

    def remember(self, prefixes: Sequence[int]) -> None:
        self._cached.remember(self.instance, prefixes)

    def begin(self, work: Work) -> None:
        """Take in work. Called only while the engine serves."""
        if work.left:
            self._prompts.append(work)
            # A step that computes prompts is full of those that came before.
            self._resume(not self._steps or not self._steps.parts)
        else:
            self._waiting.append(work)
            self._resume(True)

    def idle(self) -> simpy.Event:
        """The event that the engine has nothing to do, and keeps nothing for others."""
        self._idle = idle = self._env.event()
        self._tell_idle()
        return idle

    def stop(self, state: EngineState) -> list[Work]:
        """End its process. Return the work that is lost with it, of which nobody is told. Its cache is gone."""
        self._finish(self._whole_steps(), math.inf)
        lost = [*self._prompts, *self._waiting, *(work for _, _, work in self._answers)]
        for works in (self._prompts, self._waiting, self._answers, self._joined):
            works.clear()
        self.state, self._context_tokens, self._steps, self._event = state, 0, None, None
        self.num_stops, self._num_kept = self.num_stops + 1, 0
        self._cached.forget(self.instance)
        self._tell_idle()
        return lost

    def start(self) -> None:
        """Start a new process if the engine is stopped. A host that says nothing starts nothing."""
        if self.state is EngineState.STOPPED:
            self.state, self.epoch = EngineState.READY, self.epoch + 1

    def keep(self) -> None:
        """Keep a computed cache for somebody who will fetch it."""
        self._num_kept += 1

    def let_go(self) -> None:
        """Let go of a kept cache: it has been fetched, or nobody wants it any more."""
        self._num_kept -= 1
        self._tell_idle()

    def _resume(self, changes_steps: bool) -> None:
        """Begin steps if none run. If `changes_steps`, those that run end with the current one."""
        if self._steps is None:
            self._begin_steps()
        elif changes_steps and self._whole_steps() + 1 < self._steps.number:
            self._schedule(self._whole_steps() + 1)

    def _whole_steps(self) -> int:
        if self._steps is None:
            return 0
        return min(int((self._env.now - self._steps.began_s) / self._steps.step_s), self._steps.number)

    def _schedule(self, number: int) -> None:
        if self._steps is None:
            return
        self._steps.number = number
        ends_s = self._steps.began_s + number * self._steps.step_s
        self._event = event = self._env.timeout(max(ends_s - self._env.now, 0.0))
        event.callbacks.append(self._ended)

    def _begin_steps(self) -> None:
        self._admit()
        num_answers = len(self._answers)
        if not num_answers and not self._prompts:
            self._steps = None
            self._tell_idle()
            return
        parts, number = self._parts(self._costs.room(num_answers))
        if num_answers:
            number = 1 if self._joined else min(number, self._answers[0][0] - self._num_steps)
        tokens = sum(part for _, part in parts)
        step_s = self._costs.seconds(tokens, num_answers, self._context_tokens)
        self._steps = Steps(self._env.now, step_s, number, parts)
        self._schedule(number)

    def _parts(self, room: int) -> tuple[tuple[tuple[Work, int], ...], int]:
        """How much of which prompts a step computes, and how many steps compute the same."""
        if not self._prompts:
            return (), 1 << 62
        head = self._prompts[0]
        if head.left >= room:
            return ((head, room),), head.left // room
        parts = []
        for work in self._prompts:
            part = min(work.left, room)
            parts.append((work, part))
            room -= part
            if not room:
                break
        return tuple(parts), 1

    def _admit(self) -> None:
        costs = self._costs
        while self._waiting and len(self._answers) < costs.max_answers:
            work = self._waiting[0]
            if self._answers and self._context_tokens + work.context_tokens > costs.cache_tokens:
                return
            self._waiting.popleft()
            self._context_tokens += work.context_tokens
            if work.num_written:
                work.waited_s = self._env.now - work.first_s
            else:
                self._joined.append(work)
            left = work.num_tokens - work.num_written
            heapq.heappush(self._answers, (self._num_steps + left, next(self.serials), work))

    def _ended(self, event: simpy.Event) -> None:
        if event is self._event and self._steps is not None:
            self._finish(self._steps.number, self._slow_s)
            self._begin_steps()

    def _finish(self, number: int, slow_s: float) -> None:
        """Take this number of the steps as over. A gap longer than `slow_s` counts as slow."""
        if self._steps is None or not number:
            return
        steps = self._steps
        self._num_steps += number
        self._busy_s += number * steps.step_s
        self._count(number, steps.step_s, slow_s)
        joined, self._joined = self._joined, []
        for work in joined:
            work.watcher.first()
        while self._answers and self._answers[0][0] <= self._num_steps:
            _, _, work = heapq.heappop(self._answers)
            self._context_tokens -= work.context_tokens
            work.watcher.ended()
        for work, part in steps.parts:
            work.left -= part * number
            if not work.left:
                self._computed(work)

    def _count(self, number: int, step_s: float, slow_s: float) -> None:
        for _, _, work in self._answers:
            if step_s > slow_s:
                # The first token has no gap before it.
                work.num_slow += number if work.num_written else number - 1
            elif work.num_written == 1 and work.waited_s + step_s > slow_s:
                work.num_slow += 1
            work.num_written += number
            work.watcher.progress(number)

    def _computed(self, work: Work) -> None:
        self._prompts.remove(work)
        if work.num_tokens:
            work.num_written, work.first_s = 1, self._env.now
            work.watcher.first()
        if work.num_tokens > 1:
            self._waiting.append(work)
        else:
            work.watcher.ended()

    def _tell_idle(self) -> None:
        if self._idle is not None and not (self._prompts or self._waiting or self._answers or self._num_kept):
            self._idle.succeed()
            self._idle = None
