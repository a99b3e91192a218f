"""What the router says of itself and of its instances: `GET /ready` and `GET /kvferry/members`."""

from __future__ import annotations

import math
from itertools import islice

from kvferry.router.fleet.instance import InstanceState
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Pair, Role

# How many pairs that cannot work together are shown: half of 1,000 instances on another version make 125,000 of them.
MAX_LISTED_PAIRS = 100


def readiness(pool: InstancePool, require_prefill: bool) -> tuple[int, dict[str, object]]:
    """HTTP status and body: 200 only when a request that came now could be sent somewhere that answers.

    An instance counts if its last probe was answered and its last requests did not all fail. `path` is how a request
    would be served; one that needs no pair is served by a decode instance alone.
    """
    num_pairs = pool.num_usable_pairs()
    reason = _reason(pool, not num_pairs and (require_prefill or pool.needs_pair()))
    body: dict[str, object] = {
        "status": reason or "ready",
        "path": "" if reason else "disaggregated" if num_pairs else "decode-only",
        "num_healthy_prefill": len(pool.healthy(Role.PREFILL)),
        "num_healthy_decode": len(pool.healthy(Role.DECODE)),
        "num_ready_prefill": len(pool.ready(Role.PREFILL)),
        "num_ready_decode": len(pool.ready(Role.DECODE)),
        "num_usable_pairs": num_pairs,
    }
    return (503 if reason else 200), body


def _reason(pool: InstancePool, lacks_pair: bool) -> str:
    if pool.draining:
        return "it is draining: it finishes open requests, then exits"
    if not pool.healthy(Role.DECODE):
        return "no decode instance is healthy"
    if not pool.can_serve():
        return "every decode instance keeps failing"
    return "no prefill and decode instance can work together" if lacks_pair else ""


def status_of(pool: InstancePool) -> dict[str, object]:
    """Plain JSON: every instance, the pairs that keep failing, and the first of those that cannot work together."""
    now = pool.now
    return {
        "members": [_instance_status(state, now) for state in pool.states],
        "broken_pairs": [
            {**_urls(pair), "breaker": str(pool.pairs.state(pair, now))} for pair in pool.pairs.not_closed(now)
        ],
        "incompatible_pairs": [_urls(pair) for pair in islice(pool.incompatible(), MAX_LISTED_PAIRS)],
        "num_incompatible_pairs": pool.num_incompatible,
        "handover_s": pool.handover.value,
    }


def _instance_status(state: InstanceState, now: float) -> dict[str, object]:
    info = state.info
    lasts_s = None if math.isinf(state.expires_at) else round(state.expires_at - now, 3)
    return {
        "role": str(state.instance.role),
        "url": state.instance.url,
        "origin": str(state.origin),
        "healthy": state.healthy,
        "ready": state.ready,
        "breaker": str(state.breaker.state(now)),
        "in_flight_requests": state.num_outstanding,
        "in_flight_tokens": state.outstanding_tokens,
        "prefill_tokens_per_s": round(state.speed.tokens_per_s, 1),
        "registration_lasts_s": lasts_s,
        "engine": info.engine,
        "version": info.version,
        "handover": str(info.handover),
        "meets_in_rooms": info.can_meet_others,
        "wire_version": info.wire_version,
        "epoch": info.epoch,
        "models": list(info.models),
        "cache": info.cache,
    }


def _urls(pair: Pair) -> dict[str, str]:
    return {"prefill": pair[0].url, "decode": pair[1].url}
