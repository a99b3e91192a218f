"""The policy that comes with the router: admission, then no prefill where it does not pay, then least work."""

from __future__ import annotations

from kvferry.router.policy.admission import refusal
from kvferry.router.policy.least_work import choose, eligible
from kvferry.router.policy.prefill_threshold import skip
from kvferry.router.policy.records import Decision, Load, NoInstance, Role, RoutingQuery, UseInstance


def balanced(query: RoutingQuery) -> Decision:
    """Pure: the same query has the same answer."""
    if query.role is Role.DECODE and (busy := refusal(query)) is not None:
        return busy
    instance = choose(_with_room(query), query.cost)
    if instance is None:
        return NoInstance()
    if query.role is Role.PREFILL and (skipped := skip(query)) is not None:
        return skipped
    return UseInstance(instance)


def _with_room(query: RoutingQuery) -> tuple[Load, ...]:
    """The candidates that take one more request; all of them where none does, for a request that has been admitted."""
    most = query.limits.max_requests
    if query.role is not Role.DECODE or not most:
        return query.candidates
    choice = eligible(query.candidates, query.cost)
    return tuple(load for load in choice if load.num_outstanding < most) or query.candidates
