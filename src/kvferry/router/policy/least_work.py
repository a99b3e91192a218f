"""Least outstanding work, with a home for prompts that begin alike: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvferry.router.policy.records import NO_COST, Instance, Load, RequestCost, Role


def able(loads: Sequence[Load]) -> list[Load]:
    """Return the loads of the instances that may be chosen.

    Where no decode instance is ready, one that answers at all is better than no answer. There is no such need for
    prefill: the decode instance can do without.
    """
    healthy = [load for load in loads if load.healthy]
    return [load for load in healthy if load.ready] or [load for load in healthy if load.instance.role is Role.DECODE]


def eligible(loads: Sequence[Load], cost: RequestCost) -> list[Load]:
    """Return the loads among which a request has a choice: those of instances in a pair, if it can be divided and there
    is one."""
    found = able(loads)
    if cost.is_divisible and any(load.num_partners for load in found):
        return [load for load in found if load.num_partners]
    return found


def choose(loads: Sequence[Load], cost: RequestCost = NO_COST) -> Instance | None:
    """The able instance with the least work, this request's included; None when there is none.

    What an instance has in its prefix cache is no work. Among equals the one with the fewest requests, then the one
    that was chosen longest ago, which is round robin; then the first in order. A count of choices would not do: an
    instance back from an outage would get every request until it had caught up.

    A prompt with prefixes goes to its home as long as that is at most this request's work behind the best one, so that
    prompts that begin alike meet, and a popular beginning still spreads.
    """
    candidates = eligible(loads, cost)
    if not candidates:
        return None
    priced = [(_cost(load, cost), load) for load in candidates]
    if cost.prefixes:
        most = min(tokens for tokens, _ in priced) + cost.work(candidates[0].instance.role)
        near = [load for tokens, load in priced if tokens <= most]
        at_home = [load.instance for load in near if load.is_home] or [load.instance for load in near]
        home = homes(cost.prefixes[0], at_home)[0]
        warm = max(near, key=lambda load: load.cached_tokens)
        return warm.instance if warm.cached_tokens else home
    return min(priced, key=lambda one: (one[0], one[1].num_outstanding, one[1].last_chosen))[1].instance


def homes(prefix: int, instances: Sequence[Instance]) -> list[Instance]:
    """The instances in the order in which they are home to a prefix.

    Rendezvous hashing: each pair has a number of its own, so an instance that comes takes only what is its own now,
    and one that leaves takes only its own along. All routers agree without speaking to each other.
    """
    return sorted(instances, key=lambda instance: _rank(prefix, instance))


def _rank(prefix: int, instance: Instance) -> bytes:
    return hashlib.blake2b(f"{prefix:x} {instance.url}".encode(), digest_size=8).digest()


def _cost(load: Load, cost: RequestCost) -> int:
    """Tokens of work on this instance once the request is there, without cached ones."""
    cached = min(load.cached_tokens, cost.prompt_tokens) if load.instance.role is Role.PREFILL else 0
    return load.outstanding_tokens + cost.work(load.instance.role) - cached
