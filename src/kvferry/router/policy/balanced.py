"""The policy that comes with the router: admission, then no prefill where it does not pay, then least work."""

from __future__ import annotations

from kvferry.router.policy.admission import refusal
from kvferry.router.policy.least_work import choose
from kvferry.router.policy.prefill_threshold import skip
from kvferry.router.policy.records import Decision, NoInstance, Role, RoutingQuery, UseInstance


def balanced(query: RoutingQuery) -> Decision:
    """Pure: the same query has the same answer."""
    if query.role is Role.DECODE and (busy := refusal(query)) is not None:
        return busy
    instance = choose(query.candidates, query.cost)
    if instance is None:
        return NoInstance()
    if query.role is Role.PREFILL and (skipped := skip(query)) is not None:
        return skipped
    return UseInstance(instance)
