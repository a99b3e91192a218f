"""When the decode instance had better compute a prompt itself: pure.

To compute a prompt where its answer is written holds up the answers that are being written there; to have it computed
elsewhere costs a handover: two legs, a claim, the wire. Below the number of tokens that a decode instance computes in
the time of one handover, the handover is the longer of the two, for this request and for all others.
"""

from __future__ import annotations

from kvferry.router.policy.admission import fastest, first_token_s
from kvferry.router.policy.records import Question, Skip

# However slow handovers are: prompts this long are what prefill instances are there for.
MAX_THRESHOLD_TOKENS = 4096


def threshold_tokens(question: Question) -> int:
    """Prompts of which fewer tokens are to be computed stay on the decode instance; 0: none do.

    A decode instance that has never been seen to compute is taken to be as fast as the prefill instances.
    """
    by_cost = 0
    if question.limits.skip_by_cost:
        speed = fastest(question.decode) or fastest(question.prefill)
        by_cost = min(int(question.handover_s * speed), MAX_THRESHOLD_TOKENS)
    return max(by_cost, question.limits.skip_below_tokens)


def skip(question: Question) -> Skip | None:
    """Why there should be no prefill leg; None when there should be one."""
    limit, task = threshold_tokens(question), question.task
    cached = max((load.cached_tokens for load in question.decode), default=0)
    if task.prompt_tokens < limit:
        return Skip("short_prompt", f"tokens={task.prompt_tokens}; threshold={limit}")
    if task.prompt_tokens - cached < limit:
        return Skip("cached_prompt", f"tokens={task.prompt_tokens}; cached={cached}; threshold={limit}")
    return _skip_queue(question)


def _skip_queue(question: Question) -> Skip | None:
    """The prefill instances are so busy that only the decode instance keeps the promised time."""
    promised_s, speed = question.limits.ttft_s, fastest(question.decode)
    across = Question(question.role, question.task, question.prefill, (), question.limits, question.handover_s)
    if not promised_s or not speed or first_token_s(across) <= promised_s:
        return None
    return Skip("ttft") if question.task.prompt_tokens / speed <= promised_s else None
