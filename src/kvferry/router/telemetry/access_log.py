"""How one request went: a line in the log, attributes of a span."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.router.events import Answered, ClientGone, Ended, Event, Failed
from kvferry.router.policy.records import Role

NO_PATH = "none"
"""The path of a request that no engine was asked to serve."""
ANSWERED = "answered"
LEFT = "left"
"""Nobody waited for the end of an early prefill any more."""

# One line per request, at the level INFO: shown with `--access-log`.
logger = logging.getLogger("kvferry.router.access")


@dataclass(frozen=True, slots=True)
class AccessLogEntry:
    """`instances` are those that were asked last of each role; `phases` the parts of the time to the first byte,
    seconds. Of a request that the router refused before it was read, little is known."""

    request_id: str
    endpoint: str
    status: int
    reason: str
    seconds: float
    model: str = ""
    path: str = NO_PATH
    instances: Mapping[Role, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)

    def log(self) -> None:
        """Write the line, with its values as fields for those who log JSON."""
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "path": self.path,
            "reason": self.reason,
            "prefill": self.instances.get(Role.PREFILL, ""),
            "decode": self.instances.get(Role.DECODE, ""),
            "seconds": round(self.seconds, 6),
            "phases_s": {name: round(seconds, 6) for name, seconds in self.phases.items()},
        }
        words = (self.endpoint, self.status, self.path, self.seconds)
        logger.info("request %s: %s %d %s in %.3f s", self.request_id, *words, extra={"fields": fields})

    def attributes(self) -> dict[str, str | float]:
        """The attributes of a span, with OpenTelemetry's names where it has some."""
        own: dict[str, str | float] = {
            "http.route": self.endpoint,
            "http.response.status_code": self.status,
            "gen_ai.request.model": self.model,
            "kvferry.path": self.path,
        }
        own |= {"kvferry.reason": self.reason} if self.reason else {}
        return own | {f"kvferry.phase.{name}_s": seconds for name, seconds in self.phases.items()}


def outcome_of(event: Event) -> str:
    """The end of a request to an engine in a word: `answered` are successes and the engine's own refusals."""
    match event:
        case Ended():
            return ANSWERED
        case Answered(status, _):
            return ANSWERED if status < 500 else f"status_{status}"
        case Failed(reason, _):
            return reason
        case ClientGone():
            return "client_left"
        case _:
            return "unknown"
