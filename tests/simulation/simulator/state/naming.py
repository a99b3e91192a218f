"""What simulated targets call their attempts: never like the request, so that who takes one for the other is found."""

from __future__ import annotations

PREFIX = "attempt:"


def attempt_of(request_id: str) -> str:
    """The name of the only attempt at a request: whoever tries again here takes another request."""
    return f"{PREFIX}{request_id}"


def request_of(claim_id: str) -> str:
    """The request of an attempt."""
    return claim_id.removeprefix(PREFIX)
