"""How caches get from engine to engine: the price of a transfer alone, and links on which transfers wait for others.

A link is a queue: it carries one transfer after the other. A transfer is over when all its links have carried it, each
of which may begin at once: the two engines' own links, and, between racks, the uplinks of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.strategy.calibration import typical_device
from kvferry.plan.strategy.cost_model import Counts, choose
from kvferry.simulate.costs import CacheSize

# Less time than this is none: sums of bytes are off by as much.
NOTHING_S = 1e-9


class Link:
    """One direction of a link. What is left of a transfer's bytes goes at the rate that the link has then."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float) -> None:
        self.changed = env.event()
        self.num_bytes = 0
        self._busy_s = 0.0
        self._env, self._full_bytes_per_s, self._bytes_per_s = env, bytes_per_s, bytes_per_s
        # At `_since_s`, all bytes up to the place `_carried` had been carried.
        self._since_s = self._carried = 0.0

    @property
    def busy_s(self) -> float:
        """How long it has carried something so far."""
        self._advance()
        return self._busy_s

    def enqueue(self, num_bytes: int) -> float:
        """Put bytes into the queue. Return the place of the last one."""
        self._advance()
        self.num_bytes += num_bytes
        return self.num_bytes

    def left_s(self, place: float) -> float:
        """The time until the byte at this place is carried, at the current rate."""
        self._advance()
        return max(place - self._carried, 0.0) / self._bytes_per_s

    def set_share(self, share: float) -> None:
        """Set the rate from now on to this share of the full one."""
        self._advance()
        self._bytes_per_s = self._full_bytes_per_s * share
        changed, self.changed = self.changed, self._env.event()
        changed.succeed()

    def _advance(self) -> None:
        now = self._env.now
        carried = min((now - self._since_s) * self._bytes_per_s, self.num_bytes - self._carried)
        self._busy_s += carried / self._bytes_per_s
        self._carried += carried
        self._since_s = now


class Network:
    """The links of engines and of racks. `uplinks` are the bytes/s of each rack's uplink, in either direction."""

    def __init__(
        self, env: simpy.Environment, cache: CacheSize, link_bytes_per_s: float, uplinks: Sequence[float]
    ) -> None:
        self.upwards = [Link(env, rate) for rate in uplinks]
        self.downwards = [Link(env, rate) for rate in uplinks]
        self._env, self._cache, self._link_bytes_per_s = env, cache, link_bytes_per_s
        self._costs = typical_device(link_bytes_per_s)
        self._links: dict[object, Link] = {}

    @property
    def links(self) -> tuple[Link, ...]:
        """The links of engines that have moved something."""
        return tuple(self._links.values())

    @property
    def uplinks(self) -> tuple[Link, ...]:
        """Both directions of the uplinks of all racks."""
        return (*self.upwards, *self.downwards)

    def link_of(self, owner: object) -> Link:
        """The own link of an engine."""
        if owner not in self._links:
            self._links[owner] = Link(self._env, self._link_bytes_per_s)
        return self._links[owner]

    def overhead_s(self, tokens: TokenRange) -> float:
        """The time that the price model adds to that of the bytes on the wire, for a transfer alone."""
        num_bytes, num_rows = self._cache.num_bytes(tokens), self._cache.num_rows(len(tokens))
        priced = choose(Counts(num_bytes, num_rows, num_rows), self._costs)
        return max(priced.predicted_s - num_bytes / self._link_bytes_per_s, 0.0)

    def move(self, source: tuple[object, int], target: tuple[object, int], tokens: TokenRange) -> simpy.Event:
        """Move the cache of tokens from an engine in a rack to another one. Return the event of its end."""
        if not tokens:
            return self._env.timeout(0.0)
        links = [self.link_of(source[0]), self.link_of(target[0])]
        if source[1] != target[1]:
            links += [self.upwards[source[1]], self.downwards[target[1]]]
        num_bytes = self._cache.num_bytes(tokens)
        places = [(link, link.enqueue(num_bytes)) for link in links]
        done = self._env.event()
        _Transfer(self._env, places, self.overhead_s(tokens), done)
        return done


class _Transfer:
    """A transfer. It looks again when it should have been carried, and when one of its uplinks changes its rate."""

    def __init__(
        self, env: simpy.Environment, places: Sequence[tuple[Link, float]], overhead_s: float, done: simpy.Event
    ) -> None:
        self._env, self._places, self._overhead_s, self._done = env, places, overhead_s, done
        self._is_carried = False
        self._watch(None)

    def _watch(self, _: simpy.Event | None) -> None:
        """Wait for the next change of an uplink's rate, and look how much is left."""
        for link, _place in self._places[2:]:
            link.changed.callbacks.append(self._changed)
        self._look(None)

    def _changed(self, event: simpy.Event) -> None:
        if not self._is_carried:
            self._watch(event)

    def _carried(self, _: simpy.Event) -> None:
        self._done.succeed()

    def _look(self, _: simpy.Event | None) -> None:
        if self._is_carried:
            return
        left_s = max(link.left_s(place) for link, place in self._places)
        self._is_carried = left_s <= NOTHING_S
        if self._is_carried:
            self._env.timeout(self._overhead_s).callbacks.append(self._carried)
        else:
            self._env.timeout(left_s).callbacks.append(self._look)
