"""Which instance serves a leg: a pure function of what is known about all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Instance", "Load", "Role", "choose"]


class Role(StrEnum):
    """What an instance is for: PREFILL computes the cache of a prompt, DECODE writes the answer."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Instance:
    """One upstream server: `url` without a trailing slash, e.g. `http://127.0.0.1:8100`."""

    url: str
    role: Role


@dataclass(frozen=True, slots=True)
class Load:
    """What is known about one instance at the moment of a choice.

    One that is `healthy` answers; one that is also `ready` wants requests. `num_outstanding` requests are assigned
    to it and not finished. `last_chosen` is the serial number of the choice that took it last, 0 when none did yet.
    """

    instance: Instance
    healthy: bool
    num_outstanding: int
    last_chosen: int
    ready: bool = True


def choose(loads: Sequence[Load]) -> Instance | None:
    """The ready instance with the least outstanding work; None when there is none.

    Where no decode instance is ready, one that answers at all is better than no answer. There is no such need for
    prefill: the decode instance can do without. Among equals the one that was chosen longest ago, which is round
    robin; then the first in order. A count of choices would not do: an instance back from an outage would get every
    request until it had caught up.
    """
    healthy = [load for load in loads if load.healthy]
    able = [load for load in healthy if load.ready] or [load for load in healthy if load.instance.role is Role.DECODE]
    if not able:
        return None
    return min(able, key=lambda load: (load.num_outstanding, load.last_chosen)).instance
