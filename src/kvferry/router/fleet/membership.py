"""Which instances there are, which of them answer, how much each has to do, and which get on with each other."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.router.fleet.circuit_breaker import BreakerSettings, Trial
from kvferry.router.fleet.compatibility import Facts, differences
from kvferry.router.fleet.instance import InstanceState, Origin, ProbeResult
from kvferry.router.fleet.open_legs import OpenLegs
from kvferry.router.fleet.pairs import Pairs
from kvferry.router.fleet.prefill_speed import Mean
from kvferry.router.fleet.request_kinds import RequestKind, RequestKinds
from kvferry.router.fleet.reservation import Reservation
from kvferry.router.policy.prefill_threshold import threshold_tokens
from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import (
    NO_COST,
    Instance,
    Load,
    NoInstance,
    Overloaded,
    Pair,
    RequestCost,
    Role,
    RoutingQuery,
    SkipPrefill,
    UseInstance,
)
from kvferry.router.policy.settings import DEFAULT_POLICY, PolicySettings
from kvferry.router.telemetry.metrics import Metrics

PAIR_BREAKER = BreakerSettings(num_failures=3, open_s=30.0, max_open_s=600.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """A leg that needs an instance. `partners` is the decode instance that a prefill instance must get on with."""

    role: Role
    cost: RequestCost = NO_COST
    excluded: frozenset[Instance] = frozenset()
    partners: tuple[Instance, ...] = ()


class Membership:
    """All instances. Belongs to the app's event loop.

    `changed` is set at each change of health, for whoever clears it and waits. `probe_requested` is set when traffic
    found something wrong with an instance or a new one came, so that the prober looks at once, whatever its interval.
    """

    def __init__(
        self, instances: Iterable[Instance], metrics: Metrics, policy_settings: PolicySettings = DEFAULT_POLICY
    ) -> None:
        self.changed = asyncio.Event()
        self.probe_requested = asyncio.Event()
        self.draining = False
        self.handover = Mean()
        self.pairs = Pairs(PAIR_BREAKER)
        self.kinds = RequestKinds()
        self.open_legs = OpenLegs()
        self.prefixes = PrefixIndex()
        self._members: dict[Instance, InstanceState] = {}
        # Those that have left while legs were under way on them.
        self._left: dict[Instance, InstanceState] = {}
        self._metrics = metrics
        self._policy_settings = policy_settings
        self._num_choices = 0
        # The last one about a prefill leg.
        self._last_query: RoutingQuery | None = None
        # Pairs that are not made of one kind; found when an instance says who it is, not for each request.
        self._incompatible: frozenset[Pair] = frozenset()
        for instance in instances:
            self.add(instance, Origin.COMMAND_LINE)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._members)

    @property
    def members(self) -> tuple[InstanceState, ...]:
        return tuple(self._members.values())

    @property
    def watched(self) -> tuple[InstanceState, ...]:
        """Those that are to be probed: all members, and whoever has left and still has something to answer."""
        self._left = {one: m for one, m in self._left.items() if self.open_legs.are_on(one)}
        return (*self.members, *self._left.values())

    @property
    def incompatible_pairs(self) -> tuple[Pair, ...]:
        """Pairs whose instances do not hold the same cache, or do not understand each other."""
        return tuple(self._incompatible)

    @property
    def now(self) -> float:
        return self._policy_settings.clock()

    def add(self, instance: Instance, origin: Origin, lease_s: float = math.inf) -> bool:
        """Take an instance in, or renew its registration; whether it is new. It is probed before it is used."""
        member = self._members.get(instance)
        if member is not None:
            if member.origin is origin:
                member.expires_at = self.now + lease_s
            return False
        self._members[instance] = InstanceState(instance, origin, self.now + lease_s)
        self._left.pop(instance, None)
        self.kinds.clear()
        self._metrics.show_health(instance, False, False)
        self._metrics.show_load(instance, 0, 0)
        if origin is not Origin.COMMAND_LINE:
            logger.info("%s instance %s has joined: %s", instance.role, instance.url, origin)
        self.probe_requested.set()
        return True

    def remove(self, instance: Instance, origin: Origin) -> bool:
        """Take it out if it came this way; whether it was there. What it is doing goes on."""
        member = self._members.get(instance)
        if member is None or member.origin is not origin:
            return False
        self._left[instance] = self._members.pop(instance)
        self.pairs.forget(instance)
        self.prefixes.forget(instance)
        self._incompatible = frozenset(pair for pair in self._incompatible if instance not in pair)
        self._metrics.forget(instance)
        logger.info("%s instance %s has left: %s", instance.role, instance.url, origin)
        self.changed.set()
        return True

    def expire(self) -> None:
        """Take out those whose registration was not renewed."""
        for member in self.members:
            if member.expires_at <= self.now:
                self.remove(member.instance, member.origin)

    def healthy(self, role: Role) -> list[Instance]:
        """The instances of a role that answer."""
        return [m.instance for m in self.members if m.instance.role is role and m.healthy]

    def answering(self, model: str) -> list[Instance]:
        """Healthy instances for a query that any of them can answer, the one to be asked first in front: those that
        want requests, decode instances, the least busy. Where none says that it has the model, all: they refuse it
        better than we could."""
        healthy = [m for m in self.members if m.healthy]
        serving = [m for m in healthy if m.serves(model)] or healthy
        order = sorted(serving, key=lambda m: (not m.ready, m.instance.role is Role.PREFILL, m.num_outstanding))
        return [m.instance for m in order]

    def ready(self, role: Role) -> list[Instance]:
        """The healthy instances of a role that want requests and did not fail again and again."""
        now = self.now
        return [m.instance for m in self.members if m.instance.role is role and m.ready and m.can_serve(now)]

    def usable_pairs(self) -> list[Pair]:
        """Pairs of ready instances that a request can be served by now."""
        decode = self.ready(Role.DECODE)
        return [(p, d) for p in self.ready(Role.PREFILL) for d in decode if self._is_compatible((p, d))]

    def has_early_legs(self, instance: Instance) -> bool:
        """Whether a prefill instance says that it refers to caches before it has computed them."""
        member = self._members.get(instance)
        return member is not None and member.facts.has_early_legs

    def can_serve(self) -> bool:
        """Whether there is a decode instance that a request could be sent to now."""
        return any(m.instance.role is Role.DECODE and m.can_serve(self.now) for m in self.members)

    def reserve(self, wanted: InstanceRequest) -> Reservation | SkipPrefill | Overloaded | NoInstance:
        """Have the policy choose; an instance that it chose is reserved, everything else is its decision."""
        query = self._query(wanted)
        decision = self._policy_settings.policy(query)
        if wanted.role is Role.PREFILL:
            self._last_query = query
        if isinstance(decision, SkipPrefill | Overloaded | NoInstance):
            return decision
        if not isinstance(decision, UseInstance):
            # Somebody else has written it.
            logger.error("the policy made no decision: it returned %.200r", decision)
            return NoInstance()
        if decision.instance not in {load.instance for load in query.candidates}:
            logger.error("the policy chose %s, which it was not offered", decision.instance)
            return NoInstance()
        member = self._members[decision.instance]
        self._num_choices += 1
        member.last_chosen = self._num_choices
        return Reservation(member, wanted.cost, self._policy_settings.clock)

    def probed(self, instance: Instance, result: ProbeResult, reason: str) -> None:
        """What a probe, or traffic, found out about an instance; of one that has left nobody else needs to know."""
        member = self._members.get(instance)
        if member is None:
            if instance in self._left:
                self._left[instance].probed(result)
            return
        if not member.probed(result):
            return
        self._metrics.show_health(instance, member.healthy, member.ready)
        level, word = (logging.INFO, "up") if member.ready else (logging.WARNING, "not ready")
        word = word if member.healthy else "down"
        logger.log(level, "%s instance %s is %s: %s", instance.role, instance.url, word, reason)
        self.changed.set()

    def end_legs_if_down(self, instance: Instance) -> None:
        """Its probe has failed: nobody is to wait any more for what it will not answer."""
        member = self._members.get(instance) or self._left.get(instance)
        if member is not None and not member.healthy:
            self.open_legs.instance_is_down(instance)

    def introduce(self, instance: Instance, facts: Facts) -> None:
        """An instance has said who it is."""
        member = self._members.get(instance)
        if member is None or member.facts == facts:
            return
        if member.introduce(facts):
            self.kinds.clear()
            self.pairs.forget(instance)
            self.prefixes.forget(instance)
        self._incompatible = frozenset(pair for pair in self._incompatible if instance not in pair)
        for pair, found in self._incompatibilities(instance):
            self._incompatible |= {pair}
            logger.warning("%s and %s are never paired: %s", *_urls(pair), "; ".join(found))

    def show(self) -> None:
        """Bring the gauges up to date for whoever reads them; at each request that would cost more than its choice."""
        for member in self.members:
            self._metrics.show_load(member.instance, member.num_outstanding, member.outstanding_tokens)
        if self._last_query is not None:
            self._metrics.show_threshold(threshold_tokens(self._last_query))

    def drain(self) -> None:
        """This router has been told to end: it is not ready any more, but it answers what comes."""
        self.draining = True

    def mark_down(self, instance: Instance, reason: str) -> None:
        """Traffic found it dead: down until a probe says otherwise, and that soon."""
        self.probed(instance, ProbeResult.DOWN, reason)
        self.request_probe()

    def request_probe(self) -> None:
        """Have all instances probed soon: something may be wrong with one, or is over."""
        self.probe_requested.set()

    def arrived(self, pair: Pair) -> None:
        """A cache got from one to the other."""
        if self.pairs.succeeded(pair):
            logger.info("transfers from %s to %s work again", pair[0].url, pair[1].url)

    def lost(self, pair: Pair, reason: str, trial: Trial | None) -> None:
        """A cache did not."""
        self._metrics.count_lost(pair, reason)
        if self.pairs.failed(pair, self.now, trial):
            logger.warning(
                "transfers from %s to %s keep failing (%s): they are not paired for a while", *_urls(pair), reason
            )

    def kind_failed(self, kind: RequestKind, trial: Trial | None) -> None:
        """No prefill instance that was asked for such a request's cache has computed it."""
        if self.kinds.failed(kind, self.now, trial):
            logger.warning(
                "prefill keeps failing for requests with %s: they go to decode alone for a while", kind.words
            )

    def _query(self, wanted: InstanceRequest) -> RoutingQuery:
        is_prefill = wanted.role is Role.PREFILL
        prefill = self._loads(Role.PREFILL, wanted)
        decode = self._loads(Role.DECODE, wanted)
        if is_prefill:
            decode = tuple(load for load in decode if load.instance in wanted.partners)
        return RoutingQuery(
            role=wanted.role,
            cost=wanted.cost,
            prefill=prefill,
            decode=decode,
            limits=self._policy_settings.limits,
            handover_s=self.handover.value,
            is_retry=bool(wanted.excluded),
        )

    def _loads(self, role: Role, wanted: InstanceRequest) -> tuple[Load, ...]:
        allowed = [m for m in self.members if m.instance.role is role and m.instance not in wanted.excluded]
        if role is Role.PREFILL:
            allowed = [m for m in allowed if all(self._is_compatible((m.instance, d)) for d in wanted.partners)]
        cost, now = wanted.cost, self.now
        serving = [m for m in allowed if m.serves(cost.model)]
        # A decode instance refuses a model that it does not have better than we could.
        members = serving or (allowed if role is Role.DECODE else [])
        return tuple(
            m.load(cost, self.prefixes.num_known(m.instance, cost.prefixes), self._num_partners(m, wanted), now)
            for m in members
        )

    def _num_partners(self, member: InstanceState, wanted: InstanceRequest) -> int:
        """Prefill instances that a decode instance could work with; a prefill instance was asked for its own."""
        if member.instance.role is Role.PREFILL or not wanted.cost.is_divisible or wanted.role is Role.PREFILL:
            return 1
        now = self.now
        prefill = (m for m in self.members if m.instance.role is Role.PREFILL and m.ready and m.can_serve(now))
        return sum(self._is_compatible((m.instance, member.instance)) for m in prefill)

    def _is_compatible(self, pair: Pair) -> bool:
        return pair not in self._incompatible and self.pairs.may_begin(pair, self.now)

    def _incompatibilities(self, instance: Instance) -> Iterable[tuple[Pair, tuple[str, ...]]]:
        for other in self.members:
            if other.instance.role is not instance.role:
                pair = (instance, other.instance) if instance.role is Role.PREFILL else (other.instance, instance)
                found = differences(*(self._members[one].facts for one in pair))
                if found:
                    yield pair, found


def _urls(pair: Pair) -> tuple[str, str]:
    return pair[0].url, pair[1].url
