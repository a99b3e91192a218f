"""What a policy is asked for a request: the loads of the instances that may be chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvferry.router.config import PolicySettings
from kvferry.router.fleet.candidates import Candidates, Draw, Group, Wanted
from kvferry.router.fleet.circuit_breaker import BreakerTable
from kvferry.router.fleet.engine_info import UNKNOWN_ENGINE, EngineInfo, Handover, differences, handover_between
from kvferry.router.fleet.instance import InstanceRequest, InstanceState
from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import Instance, Load, Pair, Role, RoutingQuery, pair_of


class Queries:
    """Makes queries from the states, broken pairs and prefixes of one pool, which change.

    An instance that says who it is leaves and joins. `kinds` are the instances of each role and kind.
    """

    def __init__(
        self,
        states: Mapping[Instance, InstanceState],
        pairs: BreakerTable[Pair],
        prefixes: PrefixIndex,
        settings: PolicySettings,
    ) -> None:
        self._states = states
        self._pairs = pairs
        self._prefixes = prefixes
        self._settings = settings
        self._candidates = Candidates(states)
        self._draw = Draw(prefixes, settings.seed)
        # The inner dictionaries keep the order of instances, and let one go without a search.
        self.kinds: dict[tuple[Role, EngineInfo], dict[Instance, None]] = {}

    def joined(self, state: InstanceState) -> None:
        """An instance has come, or has said who it is."""
        self.kinds.setdefault((state.instance.role, state.kind), {})[state.instance] = None
        self._candidates.changed()

    def left(self, state: InstanceState) -> None:
        """An instance has gone, or is about to say who it is."""
        key = state.instance.role, state.kind
        del self.kinds[key][state.instance]
        if not self.kinds[key]:
            del self.kinds[key]
        self._candidates.changed()

    def incompatible(self) -> Iterator[tuple[Collection[Instance], Collection[Instance]]]:
        """Prefill instances, and decode instances that none of these can exchange a cache with."""
        for (role, prefill), sources in self.kinds.items():
            for (other, decode), targets in self.kinds.items():
                if (role, other) == (Role.PREFILL, Role.DECODE) and differences(prefill, decode):
                    yield sources, targets

    def query(self, request: InstanceRequest, handover_s: float) -> RoutingQuery:
        """All that a policy is told for this request."""
        now = self._settings.clock()
        if request.role is Role.PREFILL:
            prefill, decode = self._prefill(request, now), self._partners(request, now)
        elif request.partners:
            prefill, decode = self._partners(request, now), self._able_to_take(request, now)
        else:
            prefill, decode = self._prefill(request, now), self._decode(request, now)
        return RoutingQuery(
            role=request.role,
            cost=request.cost,
            prefill=prefill,
            decode=decode,
            limits=self._settings.limits,
            handover_s=handover_s,
            is_retry=bool(request.excluded),
        )

    def _partners(self, request: InstanceRequest, now: float) -> tuple[Load, ...]:
        """The load of the instance that was chosen before, if it has not left meanwhile."""
        states = [self._states[one] for one in request.partners if one in self._states and one not in request.excluded]
        cost, known = request.cost, self._prefixes.num_known
        return tuple(state.load(cost, known(state.instance, cost.prefixes), 1, True, now) for state in states)

    def is_of_an_unknown_model(self, request: InstanceRequest) -> bool:
        """Whether the decode instance that was chosen will tell the client that nobody has this model."""
        kinds = [self._kind(one) for one in request.partners]
        is_told = request.role is Role.PREFILL and kinds and all(kind.computes_prompts for kind in kinds)
        model = request.cost.model
        return bool(is_told) and not any(self._candidates.group(Wanted(role, model)).states for role in Role)

    def is_some(self, request: InstanceRequest) -> bool:
        """Whether a policy is told of only some of the instances, and of others if it is asked again."""
        return self._candidates.group(Wanted(request.role)).is_large

    def _prefill(self, request: InstanceRequest, now: float) -> tuple[Load, ...]:
        kinds = [self._kind(one) for one in request.partners]
        partner = kinds[0] if kinds else None
        group = self._candidates.group(Wanted(Role.PREFILL, request.cost.model, partner))
        found = self._some(group, request, now)
        # An engine refuses a model that it does not have better than the router could.
        if not found and not all(kind.computes_prompts for kind in kinds):
            group = self._candidates.group(Wanted(Role.PREFILL, None, partner))
            found = self._some(group, request, now)
        return self._loads(found, group, request, now)

    def _able_to_take(self, request: InstanceRequest, now: float) -> tuple[Load, ...]:
        """Ready decode instances that can read what a prefill instance has computed and refers to, if that instance is
        still there. For those that would have to meet it in a room it is too late."""
        source = self._states.get(request.partners[0])
        if source is None or not source.healthy:
            return ()
        kind = source.kind

        def is_able(state: InstanceState) -> bool:
            return state.ready and handover_between(kind, state.kind) is Handover.REFERENCE

        group = self._candidates.group(Wanted(Role.DECODE, request.cost.model, kind))
        found = list(filter(is_able, self._some(group, request, now)))
        if not found and group.is_large:
            found = list(filter(is_able, self._free(group.states, request, now)))
        return self._loads(found, group, request, now)

    def _free(self, states: Sequence[InstanceState], request: InstanceRequest, now: float) -> list[InstanceState]:
        """Return the states that are not excluded, and whose pairs with the request's partners do not keep failing."""
        excluded, pairs = request.excluded, self._pairs
        found = [state for state in states if state.instance not in excluded] if excluded else list(states)
        for partner in request.partners if len(pairs) else ():
            found = [state for state in found if pairs.may_begin(pair_of(state.instance, partner), now)]
        return found

    def _decode(self, request: InstanceRequest, now: float) -> tuple[Load, ...]:
        model: str | None = request.cost.model
        group = self._candidates.group(Wanted(Role.DECODE, model))
        found = self._some(group, request, now)
        if not found:
            model, group = None, self._candidates.group(Wanted(Role.DECODE))
            found = self._some(group, request, now)
        if request.alone or not request.cost.is_divisible:
            computing = self._candidates.group(Wanted(Role.DECODE, model, computes=True))
            able = self._some(computing, request, now)
            if request.cost.is_divisible:
                # Another one can serve it as well, with a partner. A request that only these can serve is not given to
                # others, even if these are down.
                able = [state for state in able if state.can_serve(now)]
            group, found = (computing, able) if able else (group, found)
        if not request.cost.is_divisible:
            return self._loads(found, group, request, now)
        num_partners = self._num_partners(found, request, now)
        if len(found) < len(group.states) and not any(num_partners.values()):
            found = self._free(group.states, request, now)
            num_partners = self._num_partners(found, request, now)
        return self._loads(found, group, request, now, num_partners)

    def _some(self, group: Group, request: InstanceRequest, now: float) -> list[InstanceState]:
        """Return instances of a group that may be chosen: some of a large group, but all if none of these can serve."""
        found = self._free(group.offered(request.cost.prefixes, self._draw), request, now)
        if not group.is_large or any(state.ready and state.can_serve(now) for state in found):
            return found
        return self._free(group.states, request, now)

    def _num_partners(
        self, states: Sequence[InstanceState], request: InstanceRequest, now: float
    ) -> dict[Instance, int]:
        """How many prefill instances each decode instance can work with, of those that are looked at."""
        ready = {kind: self._ready_for(kind, request, now) for kind in {state.kind for state in states}}
        found = {state.instance: len(ready[state.kind]) for state in states}
        for prefill, decode in self._pairs.not_closed(now):
            is_counted = decode in found and prefill in ready[self._kind(decode)]
            if is_counted and not self._pairs.may_begin((prefill, decode), now):
                found[decode] -= 1
        return found

    def _ready_for(self, kind: EngineInfo, request: InstanceRequest, now: float) -> set[Instance]:
        group = self._candidates.group(Wanted(Role.PREFILL, None, kind))
        found = self._some(group, InstanceRequest(Role.PREFILL, request.cost), now)
        return {state.instance for state in found if state.ready and state.can_serve(now)}

    def _loads(
        self,
        states: Sequence[InstanceState],
        group: Group,
        request: InstanceRequest,
        now: float,
        num_partners: Mapping[Instance, int] | None = None,
    ) -> tuple[Load, ...]:
        cost, known = request.cost, self._prefixes.num_known
        homes, numbers = group.homes(cost.prefixes), num_partners or {}
        one_by_one = ((state, state.instance) for state in states)
        return tuple(
            state.load(cost, known(instance, cost.prefixes), numbers.get(instance, 1), instance in homes, now)
            for state, instance in one_by_one
        )

    def _kind(self, instance: Instance) -> EngineInfo:
        return self._states[instance].kind if instance in self._states else UNKNOWN_ENGINE
