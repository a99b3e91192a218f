"""Everything that goes into a session and everything that comes out of it.

Events and commands are data, so that a test is a list of events and the list of commands that must follow. `peer` is
a `PeerKey` where we speak first (target side) and an opaque name to answer where the peer does (source side). Times
are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.errors import TransferError
from kvferry.plan.copies import Copies, Direction
from kvferry.plan.extract import Extract
from kvferry.plan.strategy import TYPICAL_HOST, Costs
from kvferry.plan.tokens import TokenRange
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey, Remote, SlotKey, WorkKey, peers_of
from kvferry.wire.messages import Message, Offer, Reference, TargetOffer

__all__ = [
    "AbortWanted",
    "Acquire",
    "Acquired",
    "NOT_AHEAD",
    "Ahead",
    "AnswerArrived",
    "Cancel",
    "ClaimKey",
    "Command",
    "Connect",
    "Count",
    "Digest",
    "Digested",
    "Disconnect",
    "DropDigest",
    "Failed",
    "FetchReport",
    "FetchWanted",
    "Fetched",
    "FrameArrived",
    "HoldWanted",
    "Knock",
    "LeaseGrown",
    "LeaseWanted",
    "LeaseWithdrawn",
    "PeerConnected",
    "PeerGone",
    "PeerKey",
    "PeerUnreachable",
    "Post",
    "ReadKey",
    "Release",
    "Remote",
    "Reply",
    "Send",
    "SlotKey",
    "SourceFree",
    "Stage",
    "Staged",
    "Stopped",
    "TargetFree",
    "Tick",
    "TicketEnded",
    "Timing",
    "WorkKey",
    "peers_of",
]


@dataclass(frozen=True, slots=True)
class Timing:
    """All deadlines, in seconds.

    A lease ends `lease_s` after it was opened or last renewed. A target renews every `heartbeat_s` and takes a peer
    for lost after `missed_heartbeats` without any answer; it repeats an unanswered message every `resend_s`.
    A claim that is faster than the engine's own word waits `early_claim_s` for its lease. A peer that nothing has been
    fetched from for `idle_peer_s` is forgotten. A lease is held for a request that waits for its turn, but no
    longer than `hold_s`. What was under way when a peer's write ended badly, or it died, has landed or is lost after
    `fence_s`.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3
    resend_s: float = 1.0
    handshake_s: float = 15.0
    transfer_s: float = 60.0
    tombstone_s: float = 60.0
    early_claim_s: float = 10.0
    hold_s: float = 600.0
    idle_peer_s: float = 600.0
    fence_s: float = 10.0

    @property
    def silence_s(self) -> float:
        """How long a peer may stay silent while it is being waited for."""
        return self.heartbeat_s * self.missed_heartbeats


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A message from somebody who addresses us: `peer` names whom to answer."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class AnswerArrived:
    """A message from a peer that we address."""

    peer: PeerKey
    message: Message


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    """The engine has computed a request and keeps its blocks until `SourceFree`.

    With `is_growing` it computes the request still, and will have `num_tokens` tokens: `LeaseGrown` says how far it is.
    """

    request_id: str
    lease_id: str
    block_tables: tuple[tuple[int, ...], ...]
    num_tokens: int
    is_growing: bool = False


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far some states are: the first `num_states` of the layout are computed for the first `num_tokens` tokens."""

    num_tokens: int
    num_states: int


NOT_AHEAD = Ahead(0, 0)


@dataclass(frozen=True, slots=True)
class LeaseGrown:
    """The first `num_ready` tokens of a growing lease are computed, and will not change any more.

    Of the tokens that follow, the states that the engine computes first may be there before the others: see `Ahead`.
    `block_tables` are those of all these tokens at least; what lies there must stay until `SourceFree`.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]
    num_ready: int
    ahead: Ahead = NOT_AHEAD


@dataclass(frozen=True, slots=True)
class LeaseWithdrawn:
    """The engine does not want to serve this request's cache any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HoldWanted:
    """The engine will fetch this cache when the request's turn comes: meet the source, and keep the lease alive.

    It ends with any `FetchWanted` of the same lease, also one of nothing.
    """

    reference: Reference
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FetchWanted:
    """The engine wants a remote cache in its own blocks. `addresses` has one control address per source rank.

    `block_tables` and `ranges` have one entry per cache group of this rank: where the tokens go, and which are wanted.
    """

    request_id: str
    reference: Reference
    addresses: tuple[str, ...]
    block_tables: tuple[tuple[int, ...], ...]
    ranges: tuple[TokenRange, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens of the request the source must have."""
        return max((tokens.last for tokens in self.ranges), default=0)


@dataclass(frozen=True, slots=True)
class AbortWanted:
    """The engine does not want a fetch any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A transport to the peer works; `choice` says which and why, `costs` what moving over it costs.

    With `is_slow` the direction in which we would move the bytes is far slower than the other one.
    """

    peer: Remote
    transport: str
    choice: str
    costs: Costs = TYPICAL_HOST
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """No transport to the peer works."""

    peer: Remote
    error: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Nobody listens at the address of a peer, as its host says: its process has ended."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class TicketEnded:
    """No byte of a posted ticket moves any more; `error` is empty when all arrived."""

    key: WorkKey
    error: str


@dataclass(frozen=True, slots=True)
class Digested:
    """A digest is known: one value of 8 bytes per state of its subject. `error` says why not; empty when it is."""

    key: WorkKey
    values: tuple[bytes, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Acquired:
    """A slot of staging memory is ours until Release. `error` says why it can never be; empty when it is."""

    key: SlotKey
    address: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """A gather or a scatter has ended; `error` is empty when every byte is where it should be."""

    key: SlotKey
    error: str


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer that we address."""

    peer: PeerKey
    message: Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a peer that has addressed us."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Connect:
    """Choose a transport from the offer; answer with PeerConnected or PeerUnreachable."""

    peer: Remote
    offer: Offer | TargetOffer


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget a peer."""

    peer: Remote


@dataclass(frozen=True, slots=True)
class Knock:
    """Find out whether anybody still listens at the address of a silent peer; answer with PeerGone if not."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class Post:
    """Start reading or writing; answer with TicketEnded."""

    key: WorkKey
    copies: Copies
    direction: Direction = Direction.READ


@dataclass(frozen=True, slots=True)
class Cancel:
    """Lose interest in a posted ticket; TicketEnded is still awaited."""

    key: WorkKey


@dataclass(frozen=True, slots=True)
class Acquire:
    """Get in line for a slot of staging memory; answer with Acquired."""

    key: SlotKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give a slot back, or leave the line: Acquired is not awaited any more."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Stage:
    """Gather from our blocks into a slot, or scatter from a slot into our blocks; answer with Staged."""

    key: SlotKey
    copies: Copies


@dataclass(frozen=True, slots=True)
class Digest:
    """Hash these bytes of our own blocks; answer with Digested. The bytes may change after DropDigest only."""

    key: WorkKey
    extracts: tuple[Extract, ...]


@dataclass(frozen=True, slots=True)
class DropDigest:
    """Lose interest in a digest; Digested is not awaited any more."""

    key: WorkKey


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What one finished fetch moved, over what, and how long each phase took (seconds).

    `verified` says by what digest: `sampled`, `full`, `off`, or `unreadable` when a sample was wanted but the CPU
    cannot read the memory of one side.
    """

    tokens: int
    num_bytes: int
    num_rows: int
    transport: str
    choice: str
    strategy: str
    phases_s: Mapping[str, float] = field(default_factory=dict)
    verified: str = "off"


@dataclass(frozen=True, slots=True)
class Fetched:
    """The cache is there and valid: the request may be decoded."""

    request_id: str
    report: FetchReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The cache did not arrive. Its blocks stay in quarantine until TargetFree."""

    request_id: str
    error: TransferError


@dataclass(frozen=True, slots=True)
class TargetFree:
    """No ticket, ours or the source's, touches the blocks of a failed fetch any more: they may be used again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SourceFree:
    """Nobody will read the blocks of a leased request any more, nor do we; `reason` says how it ended."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Not from a session but from its owner: we move nothing any more, and no further notice will come.

    A source that was writing when this happened may still do so: the blocks of such fetches stay in quarantine for
    the rest of the process's life.
    """


@dataclass(frozen=True, slots=True)
class Count:
    """Something worth a counter: `what` names it, `reason` labels it."""

    what: str
    reason: str


Command = (
    Send
    | Reply
    | Connect
    | Disconnect
    | Knock
    | Post
    | Cancel
    | Acquire
    | Release
    | Stage
    | Digest
    | DropDigest
    | Fetched
    | Failed
    | TargetFree
    | SourceFree
    | Count
)
