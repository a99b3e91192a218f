"""Whether a request can be served in time, and what to tell a client when it cannot: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.router.policy.least_work import able, choose, eligible
from kvferry.router.policy.records import Load, Overloaded, RoutingQuery

MIN_RETRY_S, MAX_RETRY_S = 1, 60


def refusal(query: RoutingQuery) -> Overloaded | None:
    """Why the request should not be taken now; None when it may be."""
    decode, limits = able(query.decode), query.limits
    if query.is_retry or not decode:
        return None
    most, choice = limits.max_requests, eligible(decode, query.cost)
    if most and all(load.num_outstanding >= most for load in choice):
        return Overloaded("decode_full", _retry_after_s(1.0))
    late_s = first_token_s(query) - limits.ttft_s if limits.ttft_s else 0.0
    return Overloaded("ttft", _retry_after_s(late_s)) if late_s > 0 and not _is_idle(query) else None


def first_token_s(query: RoutingQuery) -> float:
    """Seconds to the first token by the best way there is; 0 as long as nothing has been measured."""
    prefill = able(query.prefill) if query.cost.is_divisible else []
    across = [_wait_s(load, query) + query.handover_s for load in prefill]
    # A decode instance that computes a prompt does so at once: its outstanding work is a batch and not a queue.
    alone = [_compute_s(load, query) for load in able(query.decode) if load.tokens_per_s]
    return min([*across, *alone], default=0.0)


def _is_idle(query: RoutingQuery) -> bool:
    """Whether the instance that would compute the prompt has nothing to do. Then no other request is in the way, and
    coming back later does not help. And only what it computes shows its speed: short prompts say little of it."""
    is_divided = query.cost.is_divisible and any(load.num_partners for load in able(query.decode))
    computing = query.prefill if is_divided and able(query.prefill) else query.decode
    chosen = choose(computing, query.cost)
    return any(load.instance == chosen and not load.num_outstanding for load in computing)


def _wait_s(load: Load, query: RoutingQuery) -> float:
    queue_s = load.outstanding_tokens / load.tokens_per_s if load.tokens_per_s else 0.0
    return queue_s + _compute_s(load, query)


def _compute_s(load: Load, query: RoutingQuery) -> float:
    uncached = max(query.cost.prompt_tokens - load.cached_tokens, 0)
    return uncached / load.tokens_per_s if load.tokens_per_s else 0.0


def _retry_after_s(seconds: float) -> int:
    return min(max(math.ceil(seconds), MIN_RETRY_S), MAX_RETRY_S)


def fastest(loads: Sequence[Load]) -> float:
    """The highest measured speed, 0 when there is none."""
    return max((load.tokens_per_s for load in loads), default=0.0)
