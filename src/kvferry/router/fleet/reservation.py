"""A request's claim on an instance, from the choice to the end of its leg."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.router.fleet.instance import InstanceState
from kvferry.router.policy.records import Instance, RequestCost


class Reservation:
    """Counts one request and its tokens to a member until `release`; tells its breaker and its speed how it went."""

    def __init__(self, member: InstanceState, cost: RequestCost, clock: Callable[[], float]) -> None:
        self._member, self._clock = member, clock
        self._tokens = cost.work(member.instance.role)
        self._prompt_tokens = cost.prompt_tokens
        self._is_open, self._is_judged, self._computes = True, False, False
        member.num_outstanding += 1
        member.outstanding_tokens += self._tokens
        self._trial = member.breaker.begin(clock())

    @property
    def instance(self) -> Instance:
        return self._member.instance

    def computes(self) -> None:
        """From now on it computes the request's prompt, so its answer tells how fast it is."""
        self._computes = True
        self._member.speed.began(self._clock())

    def answers(self) -> None:
        """Its first byte is there, so the prompt is computed."""
        self._end_computing(self._prompt_tokens)

    def succeeded(self) -> None:
        """It has answered, all of it."""
        self._end_computing(self._prompt_tokens)
        self._is_judged = True
        self._member.breaker.succeeded()

    def failed(self) -> None:
        """It did not, and that is its own fault."""
        self._end_computing(0)
        self._is_judged = True
        self._member.breaker.failed(self._clock(), self._trial)

    def suspected(self) -> None:
        """It did not, and whose fault that is shows later: `failed` or `acquitted` follows."""
        self._end_computing(0)
        self._is_judged = True

    def acquitted(self) -> None:
        """It did not, and nobody can say whose fault that is."""
        self._member.breaker.abandoned(self._trial)

    def progress(self, num_tokens: int) -> None:
        """That many tokens have been written."""
        done = min(num_tokens, self._tokens)
        self._tokens -= done
        self._member.outstanding_tokens -= done

    def release(self) -> None:
        """The leg is over. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_computing(0)
        if not self._is_judged:
            self._member.breaker.abandoned(self._trial)
        self._member.num_outstanding -= 1
        self._member.outstanding_tokens -= self._tokens

    def _end_computing(self, num_tokens: int) -> None:
        if self._computes:
            self._computes = False
            self._member.speed.ended(self._clock(), num_tokens)
