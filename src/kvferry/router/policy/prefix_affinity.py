"""Which beginnings of prompts each instance has been given: what it may have in its prefix cache. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvferry.router.policy.records import Instance

# About 400 bytes each.
MAX_NAMES = 1 << 20
# A request does not wait for more.
MAX_TRIMMED = 128


class PrefixIndex:
    """Remembers the last `max_names` prefixes per instance, and of many instances soon no more than `max_in_all`
    altogether; those that were not used longest are forgotten."""

    def __init__(self, max_names: int = 16384, max_in_all: int = MAX_NAMES) -> None:
        self._max_names, self._max_in_all = max_names, max_in_all
        # Whoever was looked at longest ago, for names that are too many, comes first.
        self._names: OrderedDict[Instance, OrderedDict[int, None]] = OrderedDict()
        # The instances of each prefix, for whoever cannot ask all instances. Dictionaries keep their order.
        self._holders: dict[int, dict[Instance, None]] = {}

    def remember(self, instance: Instance, prefixes: Sequence[int]) -> None:
        """Note that a prompt with these prefixes, the shortest first, was computed or received there."""
        names = self._names.setdefault(instance, OrderedDict())
        # The shortest comes last, to be forgotten last: a longer one is of no use without it.
        for name in reversed(prefixes):
            names[name] = None
            names.move_to_end(name)
            self._holders.setdefault(name, {})[instance] = None
        self._trim(instance, len(names))
        # Of one that is given nothing any more, while others have come.
        other = next(iter(self._names))
        self._trim(other, MAX_TRIMMED)
        self._names.move_to_end(other)

    def num_known(self, instance: Instance, prefixes: Sequence[int]) -> int:
        """How many of the prefixes, from the shortest on, it has seen."""
        # Most have not even seen the shortest.
        if not prefixes or instance not in self._holders.get(prefixes[0], ()):
            return 0
        names = self._names[instance]
        return next((i for i, name in enumerate(prefixes) if name not in names), len(prefixes))

    def holders(self, prefixes: Sequence[int]) -> Iterable[Instance]:
        """The instances that have seen the longest prefix that any has seen, in the order in which they first did."""
        return next((self._holders[name] for name in reversed(prefixes) if name in self._holders), ())

    def forget(self, instance: Instance) -> None:
        """Forget an instance that has left, or has been restarted: its cache is gone."""
        for name in self._names.pop(instance, ()):
            self._drop(instance, name)

    def _trim(self, instance: Instance, at_most: int) -> None:
        names = self._names[instance]
        too_many = len(names) - min(self._max_names, self._max_in_all // len(self._names))
        for _ in range(min(too_many, at_most)):
            self._drop(instance, names.popitem(last=False)[0])

    def _drop(self, instance: Instance, name: int) -> None:
        holders = self._holders[name]
        del holders[instance]
        if not holders:
            del self._holders[name]
