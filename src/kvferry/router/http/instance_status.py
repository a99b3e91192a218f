"""What the router knows of its instances, for people and programs: `GET /kvferry/members`."""

from __future__ import annotations

import math

from kvferry.router.fleet.instance import InstanceState
from kvferry.router.fleet.membership import Membership


def status_of(membership: Membership) -> dict[str, object]:
    """Plain JSON: every instance, and the pairs that are out."""
    now = membership.now
    pairs = [
        {"prefill": pair[0].url, "decode": pair[1].url, "breaker": str(membership.pairs.state(pair, now))}
        for pair in membership.pairs.broken(now)
    ]
    incompatible_pairs = [{"prefill": pair[0].url, "decode": pair[1].url} for pair in membership.incompatible_pairs]
    return {
        "members": [_member(member, now) for member in membership.members],
        "broken_pairs": pairs,
        "incompatible_pairs": incompatible_pairs,
        "handover_s": membership.handover.value,
    }


def _member(member: InstanceState, now: float) -> dict[str, object]:
    facts = member.facts
    lasts_s = None if math.isinf(member.expires_at) else round(member.expires_at - now, 3)
    return {
        "role": str(member.instance.role),
        "url": member.instance.url,
        "origin": str(member.origin),
        "healthy": member.healthy,
        "ready": member.ready,
        "breaker": str(member.breaker.state(now)),
        "in_flight_requests": member.num_outstanding,
        "in_flight_tokens": member.outstanding_tokens,
        "prefill_tokens_per_s": round(member.speed.tokens_per_s, 1),
        "registration_lasts_s": lasts_s,
        "engine": facts.engine,
        "version": facts.version,
        "wire_version": facts.wire_version,
        "epoch": facts.epoch,
        "models": list(facts.models),
        "cache": facts.cache,
    }
