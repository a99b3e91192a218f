"""All instances: which there are, which of them answer, how much each has to do, and which can exchange caches."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, product

from kvferry.router.config import DEFAULT_POLICY, PolicySettings
from kvferry.router.fleet.circuit_breaker import BreakerSettings, BreakerState, BreakerTable, Trial
from kvferry.router.fleet.engine_info import UNKNOWN_ENGINE, EngineInfo, differences
from kvferry.router.fleet.instance import InstanceRequest, InstanceState, OpenRequests, Origin, ProbeResult, Reservation
from kvferry.router.fleet.prefill_speed import Mean
from kvferry.router.fleet.probe_schedule import ProbeRequests
from kvferry.router.fleet.queries import Queries
from kvferry.router.policy.prefill_threshold import threshold_tokens
from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import (
    Instance,
    NoInstance,
    Overloaded,
    Pair,
    Role,
    RoutingQuery,
    SkipPrefill,
    UseInstance,
)
from kvferry.router.request.request_kind import RequestKind
from kvferry.router.telemetry.metrics import Metrics

PAIR_BREAKER = BreakerSettings(num_failures=3, open_s=30.0, max_open_s=600.0)
KIND_BREAKER = BreakerSettings(num_failures=5, open_s=5.0, max_open_s=60.0)
# Clients write what they like into requests: no more kinds than these are remembered.
MAX_KINDS = 256
# Pairs that have failed since they last worked. Of thousands of instances the same two rarely meet again.
MAX_PAIRS = 1 << 14
# How often a policy is asked in all if it is offered some of very many instances, others each time, and refuses.
NUM_DRAWS = 4
# How many instances one line of the log names.
MAX_NAMED = 3

logger = logging.getLogger(__name__)


class InstancePool:
    """Belongs to the app's event loop.

    `changed` is set at each change of health, for whoever clears it and waits. `probe_requests` has the instances that
    traffic found something wrong with, and those that are new, so that the prober looks at once, whatever its interval.
    """

    def __init__(
        self, instances: Iterable[Instance], metrics: Metrics, policy_settings: PolicySettings = DEFAULT_POLICY
    ) -> None:
        self.changed = asyncio.Event()
        self.probe_requests = ProbeRequests()
        self.draining = False
        self.handover = Mean()
        # A transfer that keeps failing between two instances says nothing about either with any other one.
        self.pairs = BreakerTable[Pair](PAIR_BREAKER, MAX_PAIRS)
        self.kinds = BreakerTable[RequestKind](KIND_BREAKER, MAX_KINDS)
        self.open_requests = OpenRequests()
        self.prefixes = PrefixIndex()
        self._states: dict[Instance, InstanceState] = {}
        self._queries = Queries(self._states, self.pairs, self.prefixes, policy_settings)
        # The states of instances that have left while requests were open on them.
        self._left: dict[Instance, InstanceState] = {}
        self._metrics = metrics
        self._policy_settings = policy_settings
        self._num_choices = 0
        self._last_prefill_query: RoutingQuery | None = None
        for instance in instances:
            self.add(instance, Origin.COMMAND_LINE)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._states)

    @property
    def states(self) -> tuple[InstanceState, ...]:
        return tuple(self._states.values())

    @property
    def probed_states(self) -> tuple[InstanceState, ...]:
        """The states of all instances, and of those that have left and still have something to answer."""
        self._left = {one: state for one, state in self._left.items() if self.open_requests.are_on(one)}
        return (*self.states, *self._left.values())

    def probed_state(self, instance: Instance) -> InstanceState | None:
        """The state of an instance, or None if it has left and has nothing to answer."""
        if instance in self._left and not self.open_requests.are_on(instance):
            del self._left[instance]
        return self._states.get(instance) or self._left.get(instance)

    @property
    def now(self) -> float:
        return self._policy_settings.clock()

    def add(self, instance: Instance, origin: Origin, lease_s: float = math.inf) -> bool:
        """Take an instance in, or renew its registration. Return whether it is new. It is probed before it is used."""
        state = self._states.get(instance)
        if state is not None:
            if state.origin is origin:
                state.expires_at = self.now + lease_s
            return False
        self._states[instance] = InstanceState(instance, origin, self.now + lease_s)
        self._queries.joined(self._states[instance])
        self._tell_incompatible(instance)
        self._left.pop(instance, None)
        self.kinds.clear()
        self._metrics.show_health(instance, False, False)
        self._metrics.show_load(instance, 0, 0)
        if origin is not Origin.COMMAND_LINE:
            logger.info("%s instance %s has joined: %s", instance.role, instance.url, origin)
        self.request_probe(instance)
        return True

    def remove(self, instance: Instance, origin: Origin) -> bool:
        """Take an instance out if it came this way. Return whether it was there. What it is doing goes on."""
        state = self._states.get(instance)
        if state is None or state.origin is not origin:
            return False
        self._left[instance] = self._states.pop(instance)
        self._queries.left(state)
        self._forget_process(instance)
        self._metrics.forget(instance)
        logger.info("%s instance %s has left: %s", instance.role, instance.url, origin)
        self.changed.set()
        return True

    def expire(self) -> None:
        """Take out those whose registration was not renewed."""
        now = self.now
        for state in [state for state in self._states.values() if state.expires_at <= now]:
            self.remove(state.instance, state.origin)

    def healthy(self, role: Role) -> list[Instance]:
        """The instances of a role that answer."""
        return [state.instance for state in self._of_role(role) if state.healthy]

    def answering(self, model: str) -> list[Instance]:
        """Healthy instances for a query that any of them can answer, in the order in which to ask them: those that are
        ready first, then decode instances, then the least busy. If none says that it has the model, it is all of them:
        an engine refuses the model better than the router could."""
        healthy = [state for state in self.states if state.healthy]
        serving = [state for state in healthy if state.serves(model)] or healthy
        serving.sort(key=lambda state: (not state.ready, state.instance.role is Role.PREFILL, state.num_outstanding))
        return [state.instance for state in serving]

    def ready(self, role: Role) -> list[Instance]:
        """The healthy instances of a role that want requests and did not fail again and again."""
        return [state.instance for state in self._of_role(role) if state.ready and state.can_serve(self.now)]

    def num_usable_pairs(self) -> int:
        """How many pairs of ready instances a request can be served by now, without a look at each of them."""
        ready = {role: set(self.ready(role)) for role in Role}
        kinds = {role: Counter(self._states[one].kind for one in ready[role]) for role in Role}
        num_pairs = sum(
            prefill_count * decode_count
            for prefill, prefill_count in kinds[Role.PREFILL].items()
            for decode, decode_count in kinds[Role.DECODE].items()
            if not differences(prefill, decode)
        )
        broken = [pair for pair in self.pairs.not_closed(self.now) if not self.pairs.may_begin(pair, self.now)]
        known = [(p, d) for p, d in broken if p in ready[Role.PREFILL] and d in ready[Role.DECODE]]
        return num_pairs - sum(not self._differences(pair) for pair in known)

    @property
    def num_incompatible(self) -> int:
        """How many pairs do not hold the same cache, or do not understand each other."""
        return sum(len(sources) * len(targets) for sources, targets in self._queries.incompatible())

    def incompatible(self) -> Iterator[Pair]:
        """These pairs. In a rollout their number grows with the square of the instances: never take all of them."""
        return chain.from_iterable(product(*both) for both in self._queries.incompatible())

    def in_flight(self, instance: Instance) -> tuple[int, int]:
        """The open requests of an instance, and their tokens of work; none of one that has left."""
        state = self._states.get(instance)
        return (state.num_outstanding, state.outstanding_tokens) if state is not None else (0, 0)

    def info_of(self, instance: Instance) -> EngineInfo:
        """What an instance says of itself; nothing if it has left."""
        state = self._states.get(instance)
        return state.info if state is not None else UNKNOWN_ENGINE

    def can_serve(self) -> bool:
        """Whether there is a decode instance that a request could be sent to now."""
        return any(state.can_serve(self.now) for state in self._of_role(Role.DECODE))

    def needs_pair(self) -> bool:
        """Whether no decode instance that a request could be sent to now computes prompts."""
        able = [state for state in self._of_role(Role.DECODE) if state.can_serve(self.now)]
        return not any(state.info.computes_prompts for state in able)

    def reserve(self, request: InstanceRequest) -> Reservation | SkipPrefill | Overloaded | NoInstance:
        """Have the policy choose. Return a reservation of the instance that it chose, or else its decision."""
        for _ in range(NUM_DRAWS):
            query = self._queries.query(request, self.handover.value)
            decision = self._policy_settings.policy(query)
            if not (isinstance(decision, Overloaded) and self._queries.is_some(request)):
                break
        if request.role is Role.PREFILL:
            self._last_prefill_query = query
        if isinstance(decision, NoInstance) and self._queries.is_of_an_unknown_model(request):
            return NoInstance("unknown_model")
        if not isinstance(decision, UseInstance):
            return _without_instance(decision, request.role)
        if decision.instance not in {load.instance for load in query.candidates}:
            logger.error("the policy chose %s, which it was not offered", decision.instance)
            return NoInstance()
        state = self._states[decision.instance]
        self._num_choices += 1
        state.last_chosen = self._num_choices
        return Reservation(state, request.cost, self._policy_settings.clock)

    def probed(self, instance: Instance, result: ProbeResult, reason: str) -> None:
        """Take what a probe, or traffic, found out about an instance. Of one that has left nobody else is told."""
        state = self._states.get(instance)
        if state is None:
            if instance in self._left:
                self._left[instance].probed(result)
            return
        was_healthy = state.healthy
        if not state.probed(result):
            return
        if was_healthy and not state.healthy:
            self.probe_requests.add_all()
        self._metrics.show_health(instance, state.healthy, state.ready)
        level, word = (logging.INFO, "up") if state.ready else (logging.WARNING, "not ready")
        word = word if state.healthy else "down"
        logger.log(level, "%s instance %s is %s: %s", instance.role, instance.url, word, reason)
        self.changed.set()

    def end_requests_if_down(self, instance: Instance) -> None:
        """End what an instance will not answer any more, if it is down. Called when its probe has failed."""
        state = self._states.get(instance) or self._left.get(instance)
        if state is not None and not state.healthy:
            self.open_requests.instance_is_down(instance)

    def introduce(self, instance: Instance, info: EngineInfo) -> None:
        """Take what an instance has said of itself."""
        state = self._states.get(instance)
        if state is None or state.info == info:
            return
        self._queries.left(state)
        if state.introduce(info):
            self.kinds.clear()
            self._forget_process(instance)
        self._queries.joined(state)
        self._tell_incompatible(instance)

    def remember(self, reservation: Reservation, prefixes: Sequence[int]) -> None:
        """Note which beginnings of prompts an instance has been given. What one has that has left is of no use."""
        if reservation.is_on(self._states.get(reservation.instance)):
            self.prefixes.remember(reservation.instance, prefixes)

    def show(self) -> None:
        """Bring the gauges up to date for whoever reads them. At each request, that would cost more than the choice."""
        now = self.now
        for state in self.states:
            self._metrics.show_load(state.instance, state.num_outstanding, state.outstanding_tokens)
            # Health as well: there may be room for an instance's series only now.
            self._metrics.show_health(state.instance, state.healthy, state.ready)
            self._metrics.show_failing(state.instance, state.breaker.state(now) is not BreakerState.CLOSED)
        self._metrics.broken_pairs.set(self._num_broken_pairs(now))
        if self._last_prefill_query is not None:
            self._metrics.skip_threshold.set(threshold_tokens(self._last_prefill_query))

    def drain(self) -> None:
        """Make the router not ready. It still answers what comes."""
        self.draining = True

    def mark_down(self, instance: Instance, reason: str) -> None:
        """Count an instance that traffic found dead as down, until a probe, which comes soon, says otherwise."""
        self.probed(instance, ProbeResult.DOWN, reason)
        self.request_probe(instance)

    def request_probe(self, instance: Instance) -> None:
        """Have an instance probed soon: it is new, or something may be wrong with it."""
        self.probe_requests.add(instance)

    def arrived(self, pair: Pair) -> None:
        """Note that a cache got from one instance to the other."""
        if self.pairs.succeeded(pair):
            logger.info("transfers from %s to %s work again", *_urls(pair))

    def count_lost(self, pair: Pair, reason: str) -> None:
        """Count a cache that did not get from one instance to the other."""
        self._metrics.lost_cache(*_urls(pair), reason)

    def lost(self, pair: Pair, reason: str, trial: Trial | None) -> None:
        """Note that a cache did not get from one instance to the other, for which the pair is to blame."""
        self.count_lost(pair, reason)
        if self.pairs.failed(pair, self.now, trial):
            message = "transfers from %s to %s keep failing (%s): they are not paired for a while"
            logger.warning(message, *_urls(pair), reason)

    def kind_failed(self, kind: RequestKind, trial: Trial | None) -> None:
        """Note that no prefill instance that was asked has computed the cache of a request of this kind."""
        if self.kinds.failed(kind, self.now, trial):
            message = "prefill keeps failing for requests with %s: they go to decode alone for a while"
            logger.warning(message, kind.words)

    def _num_broken_pairs(self, now: float) -> int:
        """How many pairs keep failing, not counting those of which one is down: that is told of the instance."""
        healthy = {state.instance for state in self.states if state.healthy}
        return sum(healthy.issuperset(pair) for pair in self.pairs.not_closed(now))

    def _forget_process(self, instance: Instance) -> None:
        self.pairs.forget(lambda pair: instance in pair)
        self.prefixes.forget(instance)

    def _of_role(self, role: Role) -> list[InstanceState]:
        return [state for state in self.states if state.instance.role is role]

    def _differences(self, pair: Pair) -> tuple[str, ...]:
        return differences(*(self._states[one].kind for one in pair))

    def _tell_incompatible(self, instance: Instance) -> None:
        """Log with whom it must not be paired, in one line for all others of a kind. If one of the two has not yet said
        who it is, which may change this, the level is DEBUG."""
        kind = self._states[instance].kind
        for (role, other_kind), instances in self._queries.kinds.items():
            if role is instance.role:
                continue
            pair = (kind, other_kind) if instance.role is Role.PREFILL else (other_kind, kind)
            if found := differences(*pair):
                level = logging.DEBUG if UNKNOWN_ENGINE in pair else logging.WARNING
                logger.log(level, "%s and %s are never paired: %s", instance.url, _named(instances), "; ".join(found))


def _without_instance(decision: object, role: Role) -> SkipPrefill | Overloaded | NoInstance:
    """Return a decision to use no instance. Somebody else has written the policy: it may have decided nothing."""
    if isinstance(decision, Overloaded | NoInstance):
        return decision
    if isinstance(decision, SkipPrefill) and role is Role.PREFILL:
        return decision
    logger.error("the policy made no decision for a %s instance: it returned %.200r", role, decision)
    return NoInstance()


def _named(instances: Collection[Instance]) -> str:
    named = [instance.url for instance in islice(instances, MAX_NAMED)]
    return ", ".join(named) + (f" and {len(instances) - MAX_NAMED} more" if len(instances) > MAX_NAMED else "")


def _urls(pair: Pair) -> tuple[str, str]:
    return pair[0].url, pair[1].url
