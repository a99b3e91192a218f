"""What a request's flow is told. P is the prefill instance, D the decode instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.router.policy.records import Instance, NoInstance, Overloaded, SkipPrefill

TOO_LATE = "request_deadline"
"""The time is over that the client has given the request: no instance is to blame."""

PREFILL_LOST = "prefill_lost"
"""A decode request was ended that waited for a cache which the prefill beside it has failed to compute."""

PREFILL_GONE = "prefill_gone"
"""The same, where nobody was at the address of the prefill instance."""

PREFILL_REFUSED = "prefill_refused"
"""A decode request was ended, since the prefill instance beside it has refused the request: its answer is for the
client."""

NOT_WANTED = "not_wanted"
"""A request was ended, since nobody waits for its answer any more."""

PREFILL_FAILS = "prefill_keeps_failing"
"""There was no prefill, since every prefill instance has answered such requests with errors."""

INSTANCE_DOWN = "instance_down"
"""A request was ended, since a probe has found its instance down."""


class Path(StrEnum):
    """How an answer came about; told to the client in `x-kvferry-path`."""

    DISAGGREGATED = "disaggregated"
    DECODE_ONLY = "decode-only"


@dataclass(frozen=True, slots=True)
class Began:
    """A request has come and has been checked."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where P and D meet. `prefill` and `decode` are the fields of their requests that say so, JSON objects.

    A P of SGLang answers when D has read its cache. Any other answers when that is computed, and keeps it for D: `kept`
    are the `kv_transfer_params` by which it can be released.
    """

    prefill: bytes
    decode: bytes
    kept: bytes = b""


@dataclass(frozen=True, slots=True)
class Picked:
    """The instance that a `Pick` asked for; it counts as loaded from now on.

    `is_early`: P shall refer to the cache before it has computed it. `room`: P refers to no cache, for P and D meet;
    then both are asked at once. `computes`: D can compute the prompt by itself.
    """

    instance: Instance
    is_early: bool = False
    room: Room | None = None
    computes: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """The whole answer to the request in flight: any answer of P, and those of D that are no success."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Promised:
    """P has begun and refers to the cache that it will compute by `transfer`. Its request goes on beside D's."""

    transfer: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """D's success with the first byte of its body. `can_append` tells whether a frame of ours may follow it,
    `is_recomputed` that D has computed the prompt because P's cache did not come."""

    can_append: bool
    is_recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The last byte of the relayed answer is with the client."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request in flight broke; its connection is closed. `reason` is a stable label, `detail` words for people.
    `is_withheld`: of D's answer, which had begun, nothing is with the client; `is_told`: all of it, with an error."""

    reason: str
    detail: str
    is_withheld: bool = False
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection. `prefill_answer` is what P has answered meanwhile, if it was P's turn."""

    prefill_answer: Answered | Promised | None = None


Event = (
    Began | Picked | NoInstance | SkipPrefill | Overloaded | Answered | Promised | Opened | Ended | Failed | ClientGone
)
