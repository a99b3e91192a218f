"""What a worker tells its agent of prefills that are promised: how far they are, and that they still go on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvferry import Ahead, LeaseProgress

# So often within a lease the agent hears that a prompt is still being computed, or waits for its turn.
WORDS_PER_LEASE = 3
# And so often when nothing more of it is: an engine that gets no further for 20 leases will not.
MAX_SILENT_WORDS = 60

Milestone = Callable[[], Callable[[], bool]]
"""Called, it marks what the engine has begun so far; what it returns says whether that is done, and does not wait."""


def at_once() -> Callable[[], bool]:
    """The milestone of an engine that has done what it has begun."""
    return lambda: True


@dataclass(slots=True)
class _Promise:
    """`last_word` is when the agent last heard of it; `num_silent` words in a row had no more tokens."""

    last_word: float
    num_silent: int = 0


@dataclass(frozen=True, slots=True)
class _Begun:
    """To be told when it is done; with `is_last` there is nothing more to come of these prefills."""

    is_done: Callable[[], bool]
    growths: Sequence[LeaseProgress]
    is_last: bool


class Growing:
    """By the agents' name of a request. `tell` is the agent's; a lease lives `lease_s` without a word.

    What a step computes is told when the next one begins, and not before the device has done it: only then has
    everything been written that belongs to the step, a speculator's layers too. Of single states it may be told in the
    middle of the step.
    """

    def __init__(
        self,
        tell: Callable[[LeaseProgress], None],
        milestone: Milestone,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._milestone = milestone
        self._word_s = lease_s / WORDS_PER_LEASE
        self._clock = clock
        self._promises: dict[str, _Promise] = {}
        # How many tokens the steps before this one have computed.
        self._num_before: dict[str, int] = {}
        self._computing: Sequence[LeaseProgress] = ()
        self._begun: deque[_Begun] = deque()

    def open(self, name: str) -> None:
        """A cache has been promised."""
        self._promises[name] = _Promise(self._clock())

    def close(self, name: str) -> None:
        """Nothing more is to be said of it. Unknown ones are fine."""
        self._promises.pop(name, None)
        self._num_before.pop(name, None)

    def step(self, growths: Sequence[LeaseProgress]) -> None:
        """A step begins, which computes `growths`; all that the steps before it compute has been begun."""
        if self._computing:
            self._begun.append(_Begun(self._milestone(), self._computing, is_last=False))
            self._num_before |= {
                grown.request_id: grown.num_ready for grown in self._computing if grown.request_id in self._promises
            }
        self._computing = growths
        self.look()
        self._keep_promises()

    def get_ahead(self, num_states: int) -> None:
        """In the middle of a step: the first states of what it computes have been begun."""
        if self._computing:
            ahead = [self._ahead(grown, num_states) for grown in self._computing]
            self._begun.append(_Begun(self._milestone(), ahead, is_last=False))
            self.look()

    def _ahead(self, grown: LeaseProgress, num_states: int) -> LeaseProgress:
        num_before = self._num_before.get(grown.request_id, 0)
        return replace(grown, num_ready=num_before, ahead=Ahead(grown.num_ready, num_states))

    def end(self, grown: LeaseProgress) -> None:
        """All of a prefill has been begun."""
        self._begun.append(_Begun(self._milestone(), (grown,), is_last=True))
        self.look()

    def look(self) -> None:
        """Tell what has been done since the last look."""
        while self._begun and self._begun[0].is_done():
            begun = self._begun.popleft()
            for grown in begun.growths:
                self._tell_of(grown, begun.is_last)

    def _tell_of(self, grown: LeaseProgress, is_last: bool) -> None:
        name = grown.request_id
        if name in self._promises:
            self._promises[name] = _Promise(self._clock())
            self._tell(grown)
        if is_last:
            self.close(name)

    def _keep_promises(self) -> None:
        """A prompt may wait for its turn longer than a lease lives: no news is news as well."""
        now = self._clock()
        for name, promise in self._promises.items():
            if now - promise.last_word >= self._word_s and promise.num_silent < MAX_SILENT_WORDS:
                self._promises[name] = _Promise(now, promise.num_silent + 1)
                self._tell(LeaseProgress(name, (), 0))
