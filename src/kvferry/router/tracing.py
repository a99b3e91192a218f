"""What the router tells about each request to whoever traces it; by default nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvferry.router.headers import Headers
from kvferry.router.policy import Instance

__all__ = ["NO_TRACING", "RequestTrace", "Tracing"]


class RequestTrace(Protocol):
    """One request. Legs do not overlap."""

    def leg_began(self, instance: Instance) -> Headers:
        """Headers that make the engine's own spans children of this leg's; they replace the client's."""
        ...

    def leg_answered(self, phases: Mapping[str, float]) -> None:
        """The leg has its answer, or the first byte of it; `phases` are the engine's seconds, in their order."""
        ...

    def leg_ended(self, outcome: str) -> None:
        """Nothing more comes of the leg."""
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


class _Untraced:
    """Requests of a router that nobody traces: the client's own headers pass as they are."""

    def begin(self, headers: Headers, request_id: str) -> RequestTrace:
        return self

    def close(self) -> None:
        return

    def leg_began(self, instance: Instance) -> Headers:
        return []

    def leg_answered(self, phases: Mapping[str, float]) -> None:
        return

    def leg_ended(self, outcome: str) -> None:
        return

    def ended(self, facts: Mapping[str, str | float]) -> None:
        return


NO_TRACING: Tracing = _Untraced()
