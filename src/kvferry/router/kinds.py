"""Kinds of requests that prefill instances answer with errors: pure, on any monotonic clock.

A prefill leg may be what an engine cannot do, whatever the instance: for a while such requests have none.
"""

from __future__ import annotations

from kvferry.request_fields import Endpoint
from kvferry.router.breaker import Breaker, BreakerState, Fuse
from kvferry.router.request import ClientRequest

__all__ = ["Kind", "Kinds", "kind_of"]

Kind = tuple[Endpoint, frozenset[str], bytes]
KIND_FUSE = Fuse(num_failures=5, open_s=5.0, max_open_s=60.0)
# Clients write what they like into requests: no more kinds than these are remembered.
MAX_KINDS = 256
MAX_CHOICE_BYTES = 32


def kind_of(request: ClientRequest) -> Kind:
    """Which fields a request has, and whether it forces a tool call."""
    choice = bytes(request.fields.get("tool_choice", b""))[:MAX_CHOICE_BYTES]
    return request.endpoint, frozenset(request.fields), choice


class Kinds:
    """A breaker for each kind that has failed since it last went well."""

    def __init__(self, fuse: Fuse = KIND_FUSE) -> None:
        self._fuse = fuse
        self._breakers: dict[Kind, Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def may_begin(self, kind: Kind, now: float) -> bool:
        """Whether a prefill leg may be tried; while one is tried after a pause, no other one is."""
        breaker = self._breakers.get(kind)
        if breaker is None:
            return True
        may_begin = breaker.may_begin(now)
        if may_begin:
            breaker.begin(now)
        return may_begin

    def succeeded(self, kind: Kind) -> None:
        self._breakers.pop(kind, None)

    def failed(self, kind: Kind, now: float) -> bool:
        """No instance could do it. Whether that makes it go without prefill from now on."""
        if kind not in self._breakers and len(self._breakers) >= MAX_KINDS:
            del self._breakers[next(iter(self._breakers))]
        breaker = self._breakers.setdefault(kind, Breaker(self._fuse))
        was_open = breaker.state(now) is BreakerState.OPEN
        breaker.failed(now)
        return breaker.state(now) is BreakerState.OPEN and not was_open

    def abandoned(self, kind: Kind) -> None:
        """The request ended before anybody could tell."""
        if kind in self._breakers:
            self._breakers[kind].abandoned()

    def clear(self) -> None:
        """There are other engines now."""
        self._breakers.clear()
