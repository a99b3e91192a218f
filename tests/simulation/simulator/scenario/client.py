"""What clients do to what they are given to hand on: it goes through their hands, so nothing in it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.wire.messages import Reference
from simulator.context import RunContext
from simulator.engines.engine import Engine

MAX_GREED = 3


class Client:
    """One client. `has_tampered` says that what it handed on is not what it was given."""

    def __init__(self, context: RunContext, name: str, engines: Sequence[Engine]) -> None:
        self.name = name
        self.has_tampered = False
        self._context = context
        self._engines = engines

    def reference(self, own: Reference, source: Engine) -> Reference:
        """The reference, or that of another request, or one put together from two."""
        others, scheduler = source.leases_of_others(own), self._context.scheduler
        if others and scheduler.chance(self._context.faults.mix):
            self._tamper("mixed reference")
            return Reference(own.engine_id, own.epoch, own.request_id, scheduler.rng.choice(list(others)))
        if others and self._context.has_names and scheduler.chance(self._context.faults.swap):
            self._tamper("another prompt's reference")
            lease_id, request_id = scheduler.rng.choice(list(others.items()))
            return Reference(own.engine_id, own.epoch, request_id, lease_id)
        return own

    def addresses(self, source: Engine) -> tuple[str, ...]:
        """Where the source's ranks are, or in another order, or those of somebody else."""
        addresses = source.addresses
        if not self._context.scheduler.chance(self._context.faults.misdirect):
            return addresses
        self._tamper("wrong addresses")
        other = self._context.scheduler.rng.choice(self._engines)
        return self._context.scheduler.rng.choice(
            [addresses[::-1], addresses[:-1], addresses + addresses, other.addresses]
        )

    def tokens(self, num_tokens: int) -> int:
        """How many tokens are asked for: what there is, or more."""
        if not self._context.scheduler.chance(self._context.faults.greedy):
            return num_tokens
        self._tamper("too many tokens")
        return num_tokens + self._context.scheduler.rng.randint(1, MAX_GREED)

    def asks_two(self) -> bool:
        """Whether two engines are asked to go on with the same request."""
        if not self._context.scheduler.chance(self._context.faults.contest):
            return False
        self._tamper("two engines")
        return True

    def _tamper(self, what: str) -> None:
        self.has_tampered = True
        self._context.log.fault(what, self.name)
