"""When the decode instance had better compute a prompt itself: pure.

To compute a prompt where its answer is written holds up the answers that are being written there; to have it computed
elsewhere costs a handover: two requests, a claim, the wire. Below the number of tokens that a decode instance computes
in the time of one handover, the handover is the longer of the two, for this request and for all others.
"""

from __future__ import annotations

from kvferry.router.policy.admission import fastest, first_token_s
from kvferry.router.policy.records import RoutingQuery, SkipPrefill

# However slow handovers are: prompts this long are what prefill instances are there for.
MAX_THRESHOLD_TOKENS = 4096


def threshold_tokens(query: RoutingQuery) -> int:
    """Prompts of which fewer tokens are to be computed stay on the decode instance; 0: none do.

    A decode instance that has never been seen to compute is taken to be as fast as the prefill instances.
    """
    by_cost = 0
    if query.limits.skip_by_cost:
        speed = fastest(query.decode) or fastest(query.prefill)
        by_cost = min(int(query.handover_s * speed), MAX_THRESHOLD_TOKENS)
    return max(by_cost, query.limits.skip_below_tokens)


def skip(query: RoutingQuery) -> SkipPrefill | None:
    """Why there should be no prefill; None when there should be one."""
    if not all(load.computes_prompts for load in query.decode):
        return None
    limit, cost = threshold_tokens(query), query.cost
    cached = max((load.cached_tokens for load in query.decode), default=0)
    if cost.prompt_tokens < limit:
        return SkipPrefill("short_prompt", f"tokens={cost.prompt_tokens}; threshold={limit}")
    if cost.prompt_tokens - cached < limit:
        return SkipPrefill("cached_prompt", f"tokens={cost.prompt_tokens}; cached={cached}; threshold={limit}")
    return _skip_queue(query)


def _skip_queue(query: RoutingQuery) -> SkipPrefill | None:
    """The decision to skip prefill, if it is so busy that only decode keeps the promised time, else None."""
    promised_s, speed = query.limits.ttft_s, fastest(query.decode)
    across = RoutingQuery(query.role, query.cost, query.prefill, (), query.limits, query.handover_s)
    if not promised_s or not speed or first_token_s(across) <= promised_s:
        return None
    return SkipPrefill("ttft") if query.cost.prompt_tokens / speed <= promised_s else None
