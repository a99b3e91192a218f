"""How fast an instance computes prompts, from what is asked of it and when it answers: pure."""

from __future__ import annotations

# Work that is this far back counts half.
HALF_LIFE_S = 30.0
WEIGHT = 0.1


class PrefillSpeed:
    """Tokens per second while there was something to do: time in which nothing is asked tells nothing.

    `now` is seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._tokens = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The measured speed, 0 as long as nothing has been computed."""
        return self._tokens / self._busy_s if self._busy_s > 0 else 0.0

    def began(self, now: float) -> None:
        self._advance(now)
        self._num_open += 1

    def ended(self, now: float, tokens: int) -> None:
        """Note that a request has ended for which `tokens` were computed, 0 if it failed."""
        self._advance(now)
        self._num_open -= 1
        self._tokens += tokens

    def _advance(self, now: float) -> None:
        if self._num_open and now > self._since:
            passed_s = now - self._since
            kept = 0.5 ** (passed_s / HALF_LIFE_S)
            self._tokens *= kept
            self._busy_s = self._busy_s * kept + passed_s
        self._since = now


class Mean:
    """A running mean in which the last values weigh most; 0 before the first."""

    def __init__(self) -> None:
        self._num = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self._num += 1
        self.value += (value - self.value) * max(WEIGHT, 1 / self._num)
