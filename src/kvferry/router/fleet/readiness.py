"""Whether the router can serve a request end to end now."""

from __future__ import annotations

from kvferry.router.fleet.membership import Membership
from kvferry.router.policy.records import Role


def readiness(membership: Membership, require_prefill: bool) -> tuple[int, dict[str, object]]:
    """HTTP status and body: 200 only when a request that came now could be sent somewhere that answers.

    An instance counts if its last probe was answered and its last requests did not all fail. `path` is how a request
    would be served; one that needs no pair is served by a decode instance alone.
    """
    pairs = membership.usable_pairs()
    reason = _reason(membership, require_prefill and not pairs)
    body: dict[str, object] = {
        "status": reason or "ready",
        "path": "" if reason else "disaggregated" if pairs else "decode-only",
        "num_healthy_prefill": len(membership.healthy(Role.PREFILL)),
        "num_healthy_decode": len(membership.healthy(Role.DECODE)),
        "num_ready_prefill": len(membership.ready(Role.PREFILL)),
        "num_ready_decode": len(membership.ready(Role.DECODE)),
        "num_usable_pairs": len(pairs),
    }
    return (503 if reason else 200), body


def _reason(membership: Membership, lacks_pair: bool) -> str:
    if membership.draining:
        return "it is draining: it finishes open requests, then exits"
    if not membership.healthy(Role.DECODE):
        return "no decode instance is healthy"
    if not membership.can_serve():
        return "every decode instance keeps failing"
    return "no prefill and decode instance can work together" if lacks_pair else ""
