"""What the router tells about each request to whoever traces it. These classes tell nobody; `opentelemetry` exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.router.policy.records import Instance
from kvferry.router.request.headers import Headers


class UpstreamTrace:
    """One request to an engine. Those of one client's request may overlap.

    `headers` make the engine's own spans children of this one; they replace the client's.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()

    def answered(self, phases: Mapping[str, float]) -> None:
        """The answer is here, or its first byte; `phases` are the engine's seconds, in their order."""

    def ended(self, outcome: str) -> None:
        """Take note that nothing more comes of it. May be called again: the first time counts."""


class RequestTrace:
    """One request of a client."""

    def upstream_began(self, instance: Instance) -> UpstreamTrace:
        """An engine is about to be asked."""
        return UpstreamTrace()

    def ended(self, facts: Mapping[str, str | float]) -> None:
        """The client has everything, or has left."""


class Tracing:
    """Made once per router."""

    def begin(self, headers: Headers, request_id: str) -> RequestTrace:
        """A request has come; a trace that its client has begun is continued."""
        return RequestTrace()

    def close(self) -> None:
        """Send what has not been sent."""


NO_TRACING = Tracing()
