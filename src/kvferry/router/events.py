"""What a request's flow is told (events) and what it wants done (commands)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill

TOO_LATE = "request_deadline"
"""Why a leg failed of which the client had said how long it may take: no instance is to blame."""

PREFILL_LOST = "prefill_lost"
"""Why a decode leg was ended that waited for a cache which an early prefill leg has failed to compute."""


PREFILL_FAILS = "prefill_keeps_failing"
"""Why a request has no prefill leg whose kind every prefill instance has answered with errors."""

INSTANCE_DOWN = "instance_down"
"""Why a leg was ended whose instance has been found down by a probe."""


class Path(StrEnum):
    """How an answer came about; told to the client in `x-kvferry-path`."""

    DISAGGREGATED = "disaggregated"
    DECODE_ONLY = "decode-only"


class Counted(StrEnum):
    """What the flow counts."""

    RETRY = "retry"
    FALLBACK = "fallback"
    UPSTREAM_ERROR = "upstream_error"
    TURNED_AWAY = "turned_away"
    REFUSED = "refused"


# Events


@dataclass(frozen=True, slots=True)
class Began:
    """A checked request is here."""


@dataclass(frozen=True, slots=True)
class Picked:
    """The instance that a `Pick` asked for; it counts as loaded from now on.

    `is_early`: P shall refer to the cache before it has computed it.
    """

    instance: Instance
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The whole answer of the leg in flight: any answer of P, and those of D that are no success."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Promised:
    """P has begun and refers to the cache that it will compute by `transfer`. Its leg goes on beside D's."""

    transfer: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """D's success with the first byte of its body. `can_append` tells whether a frame of ours may follow it."""

    can_append: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The last byte of the relayed answer is with the client."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The leg in flight broke; its connection is closed. `reason` is a stable label, `detail` words for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection. `last_word` is what P has answered meanwhile, if it was P's turn."""

    last_word: bytes = b""


Event = (
    Began | Picked | NoInstance | SkipPrefill | Overloaded | Answered | Promised | Opened | Ended | Failed | ClientGone
)


# Commands


@dataclass(frozen=True, slots=True)
class Pick:
    """Choose a healthy instance of `role` outside `excluded`.

    Answered by `Picked`, `NoInstance`, `SkipPrefill` (prefill only) or `Overloaded`.
    """

    role: Role
    excluded: frozenset[Instance]


@dataclass(frozen=True, slots=True)
class Send:
    """Start a leg: POST `body` to `instance`; answered by `Answered`, `Promised`, `Opened` or `Failed`."""

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
    """Close the upstream connections of the legs in flight, which tells the engines to stop."""


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
    """Close the client's connection mid-body: nothing else can tell it that the answer is incomplete."""


@dataclass(frozen=True, slots=True)
class Count:
    """Add one to a counter. `role` says whose leg it was about."""

    what: Counted
    role: Role
    reason: str


Command = Pick | Send | Release | Cancel | Relay | Forward | Refuse | EndWithError | Cut | Count
