"""Which instances a policy is asked about: all that can take a request, or of very many some, found without a look at
each of them.

A policy looks at every candidate. Of a thousand instances it is offered `MAX_OFFERED`: the least busy of so many is
hardly busier than the least busy of all (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
`NUM_HOMES` of them are those where prompts that begin alike meet, found on a ring of hashes; the others are drawn.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cached_property

from kvferry.router.fleet.engine_info import EngineInfo, differences
from kvferry.router.fleet.instance import InstanceState
from kvferry.router.policy.records import Instance, Role

MAX_OFFERED = 64
NUM_HOMES = 8
# Clients write what they like into requests: no more models than these are remembered.
MAX_GROUPS = 1024


class Group:
    """Instances of which any can take a request. `states` are in the order in which they came."""

    def __init__(self, states: Sequence[InstanceState]) -> None:
        self.states = tuple(states)

    def offered(self, prefixes: Sequence[int], dice: random.Random) -> tuple[InstanceState, ...]:
        """All of them, or some, in order: `homes` of the first prefix, and others."""
        if len(self.states) <= MAX_OFFERED:
            return self.states
        homes = self._homes(prefixes)
        drawn = dice.sample(range(len(self.states)), MAX_OFFERED - len(homes))
        return tuple(self.states[number] for number in sorted(homes.union(drawn)))

    def homes(self, prefixes: Sequence[int]) -> frozenset[Instance]:
        """Where prompts that begin alike meet; equal for all routers with the same instances."""
        if len(self.states) <= MAX_OFFERED:
            return frozenset(state.instance for state in self.states)
        return frozenset(self.states[number].instance for number in self._homes(prefixes))

    def _homes(self, prefixes: Sequence[int]) -> set[int]:
        if not prefixes:
            return set()
        first = bisect(self._ring, (_place(f"{prefixes[0]:x}"), 0))
        return {self._ring[(first + step) % len(self._ring)][1] for step in range(NUM_HOMES)}

    @cached_property
    def _ring(self) -> list[tuple[int, int]]:
        """The place of each on it, and its number."""
        return sorted((_place(state.instance.url), number) for number, state in enumerate(self.states))


class Candidates:
    """Groups of a pool's instances. `changed` follows whenever one comes, leaves, or says who it is."""

    def __init__(self, states: Mapping[Instance, InstanceState]) -> None:
        self._states = states
        self._groups: dict[tuple[Role, str, EngineInfo | None], Group] = {}

    def changed(self) -> None:
        self._groups.clear()

    def group(self, role: Role, model: str = "", partner: EngineInfo | None = None) -> Group:
        """Those of a role that have a model, as far as they tell, and can exchange a cache with such a partner, where
        they need one. The empty name stands for any model."""
        key = role, model, partner
        if key not in self._groups:
            if len(self._groups) >= MAX_GROUPS:
                self._groups.clear()
            self._groups[key] = Group([state for state in self._states.values() if _is_in(state, *key)])
        return self._groups[key]


def _is_in(state: InstanceState, role: Role, model: str, partner: EngineInfo | None) -> bool:
    if state.instance.role is not role or not state.serves(model):
        return False
    if partner is None:
        return True
    pair = (state.kind, partner) if role is Role.PREFILL else (partner, state.kind)
    return not differences(*pair)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
