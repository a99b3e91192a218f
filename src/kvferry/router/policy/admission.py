"""Whether a request can be served in time, and what to tell a client when it cannot: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.router.policy.least_work import able, choose
from kvferry.router.policy.records import Busy, Load, Question

MIN_RETRY_S, MAX_RETRY_S = 1, 60


def refusal(question: Question) -> Busy | None:
    """Why the request should not be taken now; None when it may be."""
    decode, limits = able(question.decode), question.limits
    if question.is_retry or not decode:
        return None
    if limits.max_requests and all(load.num_outstanding >= limits.max_requests for load in decode):
        return Busy("decode_full", _retry_after_s(1.0))
    estimate_s = first_token_s(question)
    if limits.ttft_s and estimate_s > limits.ttft_s and not _is_idle(question):
        return Busy("ttft", _retry_after_s(estimate_s - limits.ttft_s))
    return None


def first_token_s(question: Question) -> float:
    """Seconds to the first token by the best way there is; 0 as long as nothing has been measured."""
    prefill = able(question.prefill) if question.task.is_divisible else []
    across = [_wait_s(load, question) + question.handover_s for load in prefill]
    # A decode instance that computes a prompt does so at once: its outstanding work is a batch and not a queue.
    alone = [_compute_s(load, question) for load in able(question.decode) if load.tokens_per_s]
    return min([*across, *alone], default=0.0)


def _is_idle(question: Question) -> bool:
    """Whether who would compute the prompt has nothing to do. Then no other request is in the way, and to come back
    later helps nobody; and how fast an instance is shows at what it computes: short prompts say little of it."""
    is_divided = question.task.is_divisible and any(load.num_partners for load in able(question.decode))
    computing = question.prefill if is_divided and able(question.prefill) else question.decode
    chosen = choose(computing, question.task)
    return any(load.instance == chosen and not load.num_outstanding for load in computing)


def _wait_s(load: Load, question: Question) -> float:
    queue_s = load.outstanding_tokens / load.tokens_per_s if load.tokens_per_s else 0.0
    return queue_s + _compute_s(load, question)


def _compute_s(load: Load, question: Question) -> float:
    uncached = max(question.task.prompt_tokens - load.cached_tokens, 0)
    return uncached / load.tokens_per_s if load.tokens_per_s else 0.0


def _retry_after_s(seconds: float) -> int:
    return min(max(math.ceil(seconds), MIN_RETRY_S), MAX_RETRY_S)


def fastest(loads: Sequence[Load]) -> float:
    """The highest measured speed, 0 when there is none."""
    return max((load.tokens_per_s for load in loads), default=0.0)
