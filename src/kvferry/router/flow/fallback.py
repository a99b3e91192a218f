"""What becomes of a request that could have a prefill leg and gets none, or none that counts: pure."""

from __future__ import annotations

from kvferry.http.openai import SERVER_ERROR, error_body
from kvferry.router.events import PREFILL_FAILS, Refuse

CODE = "prefill_unavailable"
RETRY_AFTER_S = 5
# The policy skips prefill for reasons of its own, such as a threshold of the operator's. These are none of them.
NOT_WANTED = frozenset((PREFILL_FAILS, "ttft"))


def is_wanted(skipped: str) -> bool:
    """Whether a prefill leg is left out because the operator wants it so, and not for want of a prefill instance."""
    return skipped not in NOT_WANTED


def refusal(reason: str) -> Refuse:
    """What the client is told; `reason` is the label of the counter."""
    message = (
        "no prefill instance can compute this prompt now, and this router does not let decode instances compute it;"
        f" hint: try again in {RETRY_AFTER_S} s"
    )
    body = error_body(message, SERVER_ERROR, CODE, None)
    body["error"]["reason"] = reason
    return Refuse(503, body, RETRY_AFTER_S)
