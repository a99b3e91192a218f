"""Which instances a policy is asked about: all that can take a request, or of very many some, found without a look at
each of them.

A policy looks at every candidate. Of a thousand instances it is offered `MAX_OFFERED`: the least busy of so many is
hardly busier than the least busy of all (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
Some of them are those that have most of the prompt in their prefix caches, and those where prompts that begin alike
meet, found on a ring of hashes; the others are drawn.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from kvferry.router.fleet.engine_info import EngineInfo, differences
from kvferry.router.fleet.instance import InstanceState
from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import Instance, Role

MAX_OFFERED = 64
NUM_HOLDERS, NUM_HOMES = 8, 8
# No model has this name.
UNTOLD = "\0"


class Draw:
    """How instances are drawn: `prefixes` says who has seen what."""

    def __init__(self, prefixes: PrefixIndex, seed: int | None) -> None:
        self.prefixes = prefixes
        self.dice = random.Random(seed)


class Group:
    """Instances of which any can take a request. `states` are in the order in which they came."""

    def __init__(self, states: Sequence[InstanceState]) -> None:
        self.states = tuple(states)

    @property
    def is_large(self) -> bool:
        """Whether only some are offered."""
        return len(self.states) > MAX_OFFERED

    def offered(self, prefixes: Sequence[int], draw: Draw) -> tuple[InstanceState, ...]:
        """Return all instances, or some of a large group, in order."""
        if not self.is_large:
            return self.states
        known = (self._numbers.get(instance) for instance in draw.prefixes.holders(prefixes))
        chosen = set(islice((number for number in known if number is not None), NUM_HOLDERS))
        chosen |= self._homes(prefixes)
        # A loop, because `sample` asks for random bits one number at a time, and takes three times as long.
        num_states, random_part = len(self.states), draw.dice.random
        while len(chosen) < MAX_OFFERED:
            chosen.add(int(random_part() * num_states))
        return tuple(self.states[number] for number in sorted(chosen))

    def homes(self, prefixes: Sequence[int]) -> frozenset[Instance]:
        """The instances where prompts that begin alike meet. Routers with equal groups choose equal ones. A small group
        has none, since it is offered whole."""
        if not self.is_large:
            return frozenset()
        return frozenset(self.states[number].instance for number in self._homes(prefixes))

    def _homes(self, prefixes: Sequence[int]) -> set[int]:
        if not prefixes:
            return set()
        first = bisect(self._ring, (_place(f"{prefixes[0]:x}"), 0))
        return {self._ring[(first + step) % len(self._ring)][1] for step in range(NUM_HOMES)}

    @cached_property
    def _ring(self) -> list[tuple[int, int]]:
        """The ring of hashes: the place of each instance on it, and its number, in the order of places."""
        return sorted((_place(state.instance.url), number) for number, state in enumerate(self.states))

    @cached_property
    def _numbers(self) -> dict[Instance, int]:
        return {state.instance: number for number, state in enumerate(self.states)}


class Wanted(NamedTuple):
    """Instances of a role that have a `model` (None: whatever they have), as far as they tell, can exchange a cache
    with such a `partner` (None: with whomever), and compute prompts, if that is needed."""

    role: Role
    model: str | None = None
    partner: EngineInfo | None = None
    computes: bool = False

    def has(self, state: InstanceState) -> bool:
        if state.instance.role is not self.role or (self.model is not None and not state.serves(self.model)):
            return False
        if self.computes and not state.info.computes_prompts:
            return False
        if self.partner is None:
            return True
        pair = (state.kind, self.partner) if self.role is Role.PREFILL else (self.partner, state.kind)
        return not differences(*pair)


class Candidates:
    """Groups of a pool's instances. `changed` must be called whenever one comes, leaves, or says who it is."""

    def __init__(self, states: Mapping[Instance, InstanceState]) -> None:
        self._states = states
        self._groups: dict[Wanted, Group] = {}
        self._models: frozenset[str] | None = None

    def changed(self) -> None:
        self._groups.clear()
        self._models = None

    def group(self, wanted: Wanted) -> Group:
        """Return a group, which is made when it is first wanted."""
        if wanted.model is not None and wanted.model not in self._told_models():
            # Clients write what they like: models that no instance names share the group of instances that name none.
            wanted = wanted._replace(model=UNTOLD)
        if wanted not in self._groups:
            self._groups[wanted] = Group([state for state in self._states.values() if wanted.has(state)])
        return self._groups[wanted]

    def _told_models(self) -> frozenset[str]:
        if self._models is None:
            told = (state.info.models for state in self._states.values())
            self._models = frozenset(name for names in told for name in names) | {""}
        return self._models


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
