"""What the router tells about each request to whoever traces it; by default nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvferry.router.policy.records import Instance
from kvferry.router.request.headers import Headers


class LegTrace(Protocol):
    """One leg of a request. Legs may overlap."""

    @property
    def headers(self) -> Headers:
        """What makes the engine's own spans children of this leg's; they replace the client's."""
        ...

    def answered(self, phases: Mapping[str, float]) -> None:
        """The leg has its answer, or the first byte of it; `phases` are the engine's seconds, in their order."""
        ...

    def ended(self, outcome: str) -> None:
        """Nothing more comes of the leg. May be said again: the first time counts."""
        ...


class RequestTrace(Protocol):
    """One request."""

    def leg_began(self, instance: Instance) -> LegTrace:
        """A leg is about to be sent."""
        ...

    def ended(self, facts: Mapping[str, str | float]) -> None:
        """The client has everything, or has left."""
        ...


class Tracing(Protocol):
    """Made once per router."""

    def begin(self, headers: Headers, request_id: str) -> RequestTrace:
        """A request has come; a trace that its client has begun is continued."""
        ...

    def close(self) -> None:
        """Send what has not been sent."""
        ...


class _UntracedLeg:
    @property
    def headers(self) -> Headers:
        return []

    def answered(self, phases: Mapping[str, float]) -> None:
        return

    def ended(self, outcome: str) -> None:
        return


UNTRACED_LEG: LegTrace = _UntracedLeg()


class _Untraced:
    """Requests of a router that nobody traces: the client's own headers pass as they are."""

    def begin(self, headers: Headers, request_id: str) -> RequestTrace:
        return self

    def close(self) -> None:
        return

    def leg_began(self, instance: Instance) -> LegTrace:
        return UNTRACED_LEG

    def ended(self, facts: Mapping[str, str | float]) -> None:
        return


NO_TRACING: Tracing = _Untraced()
