"""What clients do to what they are given to hand on: it goes through their hands, so nothing in it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.testing.simulation.engine import Engine
from kvferry.testing.simulation.site import Site
from kvferry.wire.messages import Reference

MAX_GREED = 3


class Client:
    """One client. `has_meddled` says that what it handed on is not what it was given."""

    def __init__(self, site: Site, name: str, engines: Sequence[Engine]) -> None:
        self.name = name
        self.has_meddled = False
        self._site = site
        self._engines = engines

    def reference(self, own: Reference, source: Engine) -> Reference:
        """The reference, or that of another request, or one put together from two."""
        others, world = source.leases_of_others(own), self._site.world
        if others and world.chance(self._site.faults.mix):
            self._meddle("mixed reference")
            return Reference(own.engine_id, own.epoch, own.request_id, world.dice.choice(list(others)))
        if others and self._site.has_names and world.chance(self._site.faults.swap):
            self._meddle("another prompt's reference")
            lease_id, request_id = world.dice.choice(list(others.items()))
            return Reference(own.engine_id, own.epoch, request_id, lease_id)
        return own

    def addresses(self, source: Engine) -> tuple[str, ...]:
        """Where the source's ranks are, or in another order, or those of somebody else."""
        addresses = source.addresses
        if not self._site.world.chance(self._site.faults.misdirect):
            return addresses
        self._meddle("wrong addresses")
        other = self._site.world.dice.choice(self._engines)
        return self._site.world.dice.choice([addresses[::-1], addresses[:-1], addresses + addresses, other.addresses])

    def tokens(self, num_tokens: int) -> int:
        """How many tokens are asked for: what there is, or more."""
        if not self._site.world.chance(self._site.faults.greedy):
            return num_tokens
        self._meddle("too many tokens")
        return num_tokens + self._site.world.dice.randint(1, MAX_GREED)

    def asks_two(self) -> bool:
        """Whether two engines are asked to go on with the same request."""
        if not self._site.world.chance(self._site.faults.contest):
            return False
        self._meddle("two engines")
        return True

    def _meddle(self, what: str) -> None:
        self.has_meddled = True
        self._site.story.fault(what, self.name)
