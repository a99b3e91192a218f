"""Which legs are under way on which instance, for whoever finds out that an instance is down."""

from __future__ import annotations

from typing import Protocol

from kvferry.router.policy.records import Instance


class OpenLeg(Protocol):
    """A leg that something is expected of."""

    @property
    def instance(self) -> Instance: ...

    def instance_is_down(self) -> None:
        """Its instance does not answer probes. Said at each probe, as long as that is so."""


class OpenLegs:
    """Belongs to the app's event loop."""

    def __init__(self) -> None:
        self._open: dict[Instance, set[OpenLeg]] = {}

    def began(self, leg: OpenLeg) -> None:
        self._open.setdefault(leg.instance, set()).add(leg)

    def ended(self, leg: OpenLeg) -> None:
        """May be told again."""
        legs = self._open.get(leg.instance)
        if legs is not None:
            legs.discard(leg)
            if not legs:
                del self._open[leg.instance]

    def are_on(self, instance: Instance) -> bool:
        return instance in self._open

    def instance_is_down(self, instance: Instance) -> None:
        for leg in tuple(self._open.get(instance, ())):
            leg.instance_is_down()
