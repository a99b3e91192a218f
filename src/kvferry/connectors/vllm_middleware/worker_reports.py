"""What vLLM's workers report of fetches and prefills through its statistics, for the answers that wait for it.

The statistics and the answers are in vLLM's API server, which makes each of them by itself: they meet in
`FETCH_OUTCOMES` and `PREFILL_STARTS`. Only what an answer waits for is kept. Both may be used from any thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvferry import Reason

RANDOM_CHARACTERS = 8
CHILD = re.compile(r"^[0-9]+_")
"""What vLLM puts before the name of a request to which several answers are wanted."""


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """How one request's cache came. If it did not, `reason` is why, and `words` tell it in full. The request then ends
    with an error if that `is_fatal`, and is computed here if not.

    `phases_s` are the seconds spent in each named phase of the transfer, those of the slowest rank.
    """

    reason: str = ""
    words: str = ""
    is_fatal: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_aborted(self) -> bool:
        """Whether nobody waited for the cache any more. An answer that waits now is not that request's, but of one that
        has taken over its name."""
        return self.reason == Reason.ABORTED

    def joined(self, other: FetchOutcome) -> FetchOutcome:
        """What two ranks of one engine report together: what one of them lacks, the request lacks."""
        failed = self if self.reason else other
        phases = {**self.phases_s}
        for name, seconds in other.phases_s.items():
            phases[name] = max(seconds, phases.get(name, 0.0))
        return FetchOutcome(failed.reason, failed.words, failed.is_fatal, phases)


@dataclass(slots=True)
class _Expected:
    """How many answers wait for a request of this name, and the outcomes by the ids that vLLM made of the name."""

    num_waiting: int = 0
    found: dict[str, FetchOutcome] = field(default_factory=dict)


class FetchOutcomes:
    """The outcomes of fetches that answers wait for, by vLLM's name of the request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, _Expected] = {}

    def expect(self, name: str) -> None:
        """Note that an answer to a request of this name waits. `forget` follows."""
        with self._lock:
            self._expected.setdefault(name, _Expected()).num_waiting += 1

    def note(self, request_id: str, outcome: FetchOutcome) -> None:
        """Note what a rank reports of a request, by vLLM's id for it."""
        with self._lock:
            for name in names_of(CHILD.sub("", request_id)):
                if (expected := self._expected.get(name)) is not None:
                    before = expected.found.get(request_id)
                    expected.found[request_id] = outcome if before is None else before.joined(outcome)

    def known(self, name: str) -> FetchOutcome | None:
        """How the cache of the request of this name came, or None if that is not known. It never is for several
        requests that cannot be told apart (a client may use a name twice)."""
        with self._lock:
            expected = self._expected.get(name)
            if expected is None or expected.num_waiting > 1 or len(expected.found) != 1:
                return None
            return next(iter(expected.found.values()))

    def failure(self, name: str) -> FetchOutcome | None:
        """The failed fetch that ended the one request of this name, or None. If that has several answers, any one's."""
        with self._lock:
            expected = self._expected.get(name)
            if expected is None or expected.num_waiting > 1:
                return None
            fatal = (each for each in expected.found.values() if each.is_fatal and not each.is_aborted)
            return next(fatal, None)

    def forget(self, name: str) -> None:
        """Note that an answer that waited is over."""
        with self._lock:
            expected = self._expected.get(name)
            if expected is not None:
                expected.num_waiting -= 1
                if not expected.num_waiting:
                    del self._expected[name]


class PrefillStarts:
    """What waits for early prefills to start, by the agents' name of the prefill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Callable[[], object]] = {}

    def expect(self, name: str, started: Callable[[], object]) -> None:
        """Call `started`, from whatever thread, when vLLM begins to compute this prefill. `forget` follows."""
        with self._lock:
            self._waiting[name] = started

    def note(self, name: str) -> None:
        """Note that vLLM has begun to compute this prefill."""
        with self._lock:
            started = self._waiting.pop(name, None)
        if started is not None:
            started()

    def forget(self, name: str) -> None:
        """Forget a prefill that nobody waits for any more. Unknown ones are fine."""
        with self._lock:
            self._waiting.pop(name, None)


FETCH_OUTCOMES = FetchOutcomes()
PREFILL_STARTS = PrefillStarts()


def names_of(request_id: str) -> Iterator[str]:
    """The names that vLLM may have been given for a request. vLLM adds random characters, unless it is told not to."""
    yield request_id
    name, dash, end = request_id.rpartition("-")
    if dash and len(end) == RANDOM_CHARACTERS:
        yield name
