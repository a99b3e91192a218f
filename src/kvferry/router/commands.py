"""What a request's flow wants done. P is the prefill instance, D the decode instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.router.policy.records import Instance, Role


class Counted(StrEnum):
    """What the flow counts."""

    RETRY = "retry"
    FALLBACK = "fallback"
    UPSTREAM_ERROR = "upstream_error"
    TURNED_AWAY = "turned_away"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Pick:
    """Choose a healthy instance of `role` outside `excluded`.

    `alone`: a decode instance that computes the prompt itself, if there is one. `source`: a prefill instance that has
    computed the prompt; only a decode instance that can take its cache will do.
    Answered by `Picked`, `NoInstance`, `SkipPrefill` (prefill only) or `Overloaded`.
    """

    role: Role
    excluded: frozenset[Instance]
    alone: bool = False
    source: Instance | None = None

    def partners(self, decode: Instance | None) -> tuple[Instance, ...]:
        """Whom the chosen instance has to exchange a cache with; `decode` is the decode instance, once it is chosen."""
        partner = decode if self.role is Role.PREFILL else self.source
        return (partner,) if partner else ()


@dataclass(frozen=True, slots=True)
class Send:
    """POST `body` to `instance`; answered by `Answered`, `Promised`, `Opened` or `Failed`."""

    instance: Instance
    body: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """POST `body` to a prefill instance beside D's request, which follows. Nothing waits for its answer: should it be
    an error, D's request ends with `PREFILL_LOST`, `PREFILL_GONE` or `PREFILL_REFUSED`."""

    instance: Instance
    body: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Tell a prefill instance, in the background, that nobody will read the cache that `body` refers to."""

    instance: Instance
    body: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Close the upstream connections of the requests in flight, which tells the engines to stop."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass the opened answer on, bytes as they arrive; answered by `Ended` or `Failed`."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Give the client the last whole answer as it is: status, headers, body."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with an error object of our own, and with `Retry-After` if it is not 0."""

    status: int
    body: dict[str, Any]
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class EndWithError:
    """Close a broken stream with an error frame and without `[DONE]`."""

    message: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cut:
    """End the request without a further word: of an answer whose body has not ended, the server closes the client's
    connection, for nothing else can tell it that the answer is incomplete."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add one to a counter. `role` says whose request it was about."""

    what: Counted
    role: Role
    reason: str


Command = Pick | Send | Start | Release | Cancel | Relay | Forward | Refuse | EndWithError | Cut | Count
