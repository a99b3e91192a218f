"""Which beginnings of prompts each instance has been given: what it may have in its prefix cache. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.router.policy.records import Instance


class PrefixIndex:
    """Remembers the last `max_names` prefixes per instance; those that were not used longest are forgotten."""

    def __init__(self, max_names: int = 16384) -> None:
        self._max_names = max_names
        self._names: dict[Instance, OrderedDict[int, None]] = {}

    def remember(self, instance: Instance, prefixes: Sequence[int]) -> None:
        """A prompt with these prefixes, the shortest first, was computed or received there."""
        names = self._names.setdefault(instance, OrderedDict())
        # The shortest last: a longer one is of no use when a shorter one is gone.
        for name in reversed(prefixes):
            names[name] = None
            names.move_to_end(name)
        while len(names) > self._max_names:
            names.popitem(last=False)

    def num_known(self, instance: Instance, prefixes: Sequence[int]) -> int:
        """How many of the prefixes, from the shortest on, it has seen."""
        names = self._names.get(instance)
        if not names:
            return 0
        return next((i for i, name in enumerate(prefixes) if name not in names), len(prefixes))

    def forget(self, instance: Instance) -> None:
        """It has left, or has been restarted: its cache is gone."""
        self._names.pop(instance, None)
