"""What goes wrong in a run, and how often: a record drawn from the run's seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Faults:
    """Likelihoods per frame, per ticket, per connection and per request; numbers per run; durations in seconds.

    Frames: `drop`, `duplicate`, `reorder`, `flip` (one bit), all up to `max_delay_s` late.
    Tickets: `slow` (seconds instead of milliseconds; digests and copies too), `fail`, `hang` (nothing moves until
    somebody loses interest), `corrupt` (one bit of what has been read is wrong; only where all of it is digested).
    `outlives`: the memory of a killed process can still be read. `unreachable`: no transport works.
    Staging: `copy_fail` (a gather or a scatter ends half way), `cramped` (an engine's staging memory has no room for
    the largest slot).
    Requests: `abort` by the client, `withdraw` by the source's engine, `release` (nothing is wanted any more), `retry`
    of a failed one under the same reference, `late` (a rank hears of the lease after it was claimed),
    `grow` (the lease is opened while the request is still computed), `tell_states` (and it is told state by state),
    `hold` (the request waits for its turn at the target, longer than a lease lasts).
    Clients: `mix` (a reference put together from two), `swap` (the reference of another prompt),
    `misdirect` (addresses in another order or of another engine),
    `greedy` (more tokens than there are), `contest` (two engines fetch the same), `linger` (a reference arrives late).
    """

    max_delay_s: float = 0.02
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0
    slow: float = 0.0
    fail: float = 0.0
    hang: float = 0.0
    corrupt: float = 0.0
    outlives: float = 0.0
    unreachable: float = 0.0
    copy_fail: float = 0.0
    cramped: float = 0.0
    abort: float = 0.0
    withdraw: float = 0.0
    release: float = 0.0
    retry: float = 0.0
    mix: float = 0.0
    swap: float = 0.0
    misdirect: float = 0.0
    greedy: float = 0.0
    contest: float = 0.0
    late: float = 0.0
    grow: float = 0.0
    tell_states: float = 0.0
    hold: float = 0.0
    linger: float = 0.0
    num_kills: int = 0
    num_partitions: int = 0
    num_stalls: int = 0
    num_full_pools: int = 0

    @classmethod
    def drawn(cls, rng: random.Random) -> Faults:
        """Calm, a theme, or a mixture in which each fault takes part with one chance in three."""
        theme = rng.choice(["calm", "mixture", "mixture", "mixture", "standstill", *THEMES])
        if theme == "calm":
            slow, late, hold, grow, by_state = (rng.choice([0.0, 0.3]) for _ in range(5))
            return replace(CALM, slow=slow, late=late, hold=hold, grow=grow, tell_states=by_state)
        if theme != "mixture":
            return THEMES[theme]
        drawn: dict[str, Any] = {f.name: _drawn(rng, f.name) for f in fields(cls) if rng.random() < 1 / 3}
        return replace(cls(), **drawn)

    @property
    def is_calm(self) -> bool:
        """Nothing happens that could end a request which its engines still want."""
        return replace(self, slow=0.0, late=0.0, hold=0.0, grow=0.0, tell_states=0.0) == CALM


CALM = Faults(abort=0.15, release=0.1)

THEMES = {
    "restarts": Faults(num_kills=4, linger=0.4, retry=0.8, outlives=0.5),
    "standstill": Faults(num_stalls=4, num_partitions=2, slow=0.4, withdraw=0.4, drop=0.1),
    "tickets": Faults(fail=0.3, slow=0.6, hang=0.1, retry=0.8, copy_fail=0.1),
    "prefills": Faults(grow=1.0, tell_states=0.9, abort=0.1, slow=0.2, fail=0.02, num_kills=1),
    "clients": Faults(
        mix=0.3, swap=0.3, misdirect=0.1, greedy=0.2, contest=0.3, abort=0.3, retry=0.8, linger=0.2, slow=0.2
    ),
}
"""Faults that make one another worse."""

_PER_RUN = {"num_kills": 3, "num_partitions": 2, "num_stalls": 3, "num_full_pools": 2}
_LIKELY = {
    "flip": 0.04,
    "retry": 0.8,
    "mix": 0.6,
    "outlives": 1.0,
    "slow": 0.5,
    "late": 0.5,
    "linger": 0.5,
    "hold": 0.5,
    "grow": 1.0,
    "tell_states": 1.0,
}


def _drawn(rng: random.Random, name: str) -> float:
    if name == "max_delay_s":
        return rng.choice([0.1, 1.0])
    if name in _PER_RUN:
        return rng.randint(1, _PER_RUN[name])
    return rng.random() * _LIKELY.get(name, 0.25)
