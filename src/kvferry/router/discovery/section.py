"""What one list says of the pool of instances: a file, or the pods of a cluster."""

from __future__ import annotations

from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Instance


class Section:
    """Takes the instances of one list into the pool, and out of it again when the list does not name them any more."""

    def __init__(self, pool: InstancePool, origin: Origin) -> None:
        self._pool = pool
        self._origin = origin
        self._listed: frozenset[Instance] = frozenset()

    def __bool__(self) -> bool:
        """Whether the list names any."""
        return bool(self._listed)

    def set(self, now: frozenset[Instance]) -> None:
        """Make these the instances of the list, and take its other ones out of the pool."""
        for instance in self._listed - now:
            self._pool.remove(instance, self._origin)
        self._listed = now
        self.renew()

    def renew(self) -> None:
        """Take in listed instances that the pool does not have: they may have come in another way before, and left."""
        for instance in sorted(self._listed, key=lambda one: (one.role, one.url)):
            self._pool.add(instance, self._origin)
