"""Which instances there are, which of them answer, and how much each has to do."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvferry.router.metrics import Metrics
from kvferry.router.policy import Instance, Load, Role, choose

__all__ = ["Membership"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """The mutable facts of one instance. Unproven instances are not healthy: the first probe decides."""

    healthy: bool = False
    ready: bool = False
    num_outstanding: int = 0
    last_chosen: int = 0


class Membership:
    """Loads and health of all instances. Belongs to the app's event loop.

    `changed` is set at each change of health, for whoever clears it and waits. `doubted` is set when traffic
    found an instance dead, so that the prober looks at once and a hiccup does not cost a whole interval.
    """

    def __init__(self, instances: tuple[Instance, ...], metrics: Metrics) -> None:
        self.changed = asyncio.Event()
        self.doubted = asyncio.Event()
        self.draining = False
        self._members = {instance: Member() for instance in instances}
        self._metrics = metrics
        self._num_choices = 0
        for instance in instances:
            metrics.show_health(instance, False, False)
            metrics.show_in_flight(instance, 0)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._members)

    def healthy(self, role: Role) -> list[Instance]:
        """The instances of a role that answer."""
        return [instance for instance, member in self._members.items() if instance.role is role and member.healthy]

    def ready(self, role: Role) -> list[Instance]:
        """The healthy instances of a role that want requests."""
        return [instance for instance in self.healthy(role) if self._members[instance].ready]

    def reserve(self, role: Role, excluded: frozenset[Instance]) -> Instance | None:
        """Choose an instance and count one request to it until `release`; None when nobody is left."""
        loads = [
            Load(instance, member.healthy, member.num_outstanding, member.last_chosen, member.ready)
            for instance, member in self._members.items()
            if instance.role is role and instance not in excluded
        ]
        instance = choose(loads)
        if instance is not None:
            self._num_choices += 1
            self._members[instance].last_chosen = self._num_choices
            self._change_outstanding(instance, +1)
        return instance

    def release(self, instance: Instance) -> None:
        """A request that was assigned to `instance` is no longer its work."""
        self._change_outstanding(instance, -1)

    def mark_up(self, instance: Instance) -> None:
        self._set_health(instance, (True, True), "it is ready")

    def mark_unready(self, instance: Instance, reason: str) -> None:
        """It answers, but wants no requests: it drains, or its transfers fail."""
        self._set_health(instance, (True, False), reason)

    def mark_down(self, instance: Instance, reason: str) -> None:
        self._set_health(instance, (False, False), reason)

    def drain(self) -> None:
        """This router has been told to end: it is not ready any more, but it answers what comes."""
        self.draining = True

    def doubt(self, instance: Instance, reason: str) -> None:
        """Traffic found it dead: down until a probe says otherwise, and that soon."""
        self.mark_down(instance, reason)
        self.doubted.set()

    def _change_outstanding(self, instance: Instance, step: int) -> None:
        member = self._members[instance]
        member.num_outstanding += step
        self._metrics.show_in_flight(instance, member.num_outstanding)

    def _set_health(self, instance: Instance, state: tuple[bool, bool], reason: str) -> None:
        member = self._members[instance]
        if (member.healthy, member.ready) == state:
            return
        member.healthy, member.ready = state
        self._metrics.show_health(instance, member.healthy, member.ready)
        level, word = (logging.INFO, "up") if member.ready else (logging.WARNING, "not ready")
        word = word if member.healthy else "down"
        logger.log(level, "%s instance %s is %s: %s", instance.role, instance.url, word, reason)
        self.changed.set()
