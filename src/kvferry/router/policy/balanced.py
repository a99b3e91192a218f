"""The policy that comes with the router: admission, then no prefill leg where it does not pay, then least work."""

from __future__ import annotations

from kvferry.router.policy.admission import refusal
from kvferry.router.policy.least_work import choose
from kvferry.router.policy.prefill_threshold import skip
from kvferry.router.policy.records import Decision, Nobody, Question, Role, Use


def balanced(question: Question) -> Decision:
    """Pure: the same question has the same answer."""
    if question.role is Role.DECODE and (busy := refusal(question)) is not None:
        return busy
    instance = choose(question.candidates, question.task)
    if instance is None:
        return Nobody()
    if question.role is Role.PREFILL and (skipped := skip(question)) is not None:
        return skipped
    return Use(instance)
