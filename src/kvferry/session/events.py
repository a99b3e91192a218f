"""Everything that goes into a session. What comes out of it is in `commands`.

Events and commands are data, so that a test is a list of events and the list of commands that must follow. `peer` is
a `PeerKey` where we speak first (target side) and an opaque name to answer where the peer does (source side). Times
are seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.plan.description.prompt import UNKNOWN_PROMPT, UNNAMED, Prompt, PromptName
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.strategy.calibration import TYPICAL_AGENTS, Costs
from kvferry.session.keys import PeerKey, Remote, SlotKey, WorkKey
from kvferry.wire.messages import FirstToken, Message, Reference


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A message from a peer that has connected to us; `peer` names whom to answer."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class AnswerArrived:
    """A message from a peer to which we have connected."""

    peer: PeerKey
    message: Message


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The engine has computed a request and keeps its blocks until `LeaseEnded`.

    With `is_growing` it computes the request still, and will have `num_tokens` tokens: `LeaseProgress` says how many of
    them are there.
    Claims for another `prompt` are refused, and all claims if it `is_unnamed`. `first_token` is what the engine has
    sampled after these tokens; readers that compute none of them need that.
    """

    request_id: str
    lease_id: str
    block_tables: tuple[tuple[int, ...], ...]
    num_tokens: int
    is_growing: bool = False
    prompt: Prompt = UNKNOWN_PROMPT
    is_unnamed: bool = False
    first_token: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far some states are: the first `num_states` of the layout are computed for the first `num_tokens` tokens."""

    num_tokens: int
    num_states: int


NOT_AHEAD = Ahead(0, 0)


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """The first `num_ready` tokens of a growing lease are computed, and will not change any more.

    Of the tokens that follow, the states that the engine computes first may be there before the others: see `Ahead`.
    `block_tables` are those of all these tokens at least; what lies there must stay until `LeaseEnded`. With the last
    token comes the `first_token` that was sampled after the prompt, if anybody needs it.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]
    num_ready: int
    ahead: Ahead = NOT_AHEAD
    first_token: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class LeaseWithdrawn:
    """The engine does not want to serve this request's cache any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RanksKnown:
    """The control addresses of all ranks of our engine, in their order, and how many engines our server is: told to
    whoever asks who is here."""

    addresses: tuple[str, ...]
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class LocateRequest:
    """The engine knows only the address of a source rank, and wants to know whose it is.

    Of a server with data parallelism that rank is one of its engine number 0, and meant is that engine whose number is
    `number` modulo how many there are.
    """

    address: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """The engine will fetch this cache when the request's turn comes: meet the source, and keep the lease alive.

    It ends with any `FetchRequest` of the same lease, also one of nothing.
    """

    reference: Reference
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The engine wants a remote cache in its own blocks. `addresses` has one control address per source rank.

    `block_tables` and `ranges` have one entry per cache group of this rank: where the tokens go, and which are wanted.
    `attempt` is unique: a late message about an earlier attempt at the same request must not be taken for one about
    this attempt. The agent makes it; without it, request ids must be unique. `prompt` names the tokens up to the last
    one that is wanted: a source that has computed others refuses.
    """

    request_id: str
    reference: Reference
    addresses: tuple[str, ...]
    block_tables: tuple[tuple[int, ...], ...]
    ranges: tuple[TokenRange, ...]
    attempt: str = ""
    prompt: PromptName = UNNAMED

    @property
    def claim_id(self) -> str:
        """What its claims are called."""
        return self.attempt or self.request_id

    @property
    def num_tokens(self) -> int:
        """How many tokens of the request the source must have."""
        return max((tokens.last for tokens in self.ranges), default=0)


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The engine does not want a fetch any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A transport to the peer works; `choice` says which and why, `costs` what moving over it costs.

    With `is_slow` the direction in which we would move the bytes is far slower than the other one. With
    `reaches_staging` we can also gather directly into the slots of a target.
    """

    peer: Remote
    transport: str
    choice: str
    costs: Costs = TYPICAL_AGENTS
    is_slow: bool = False
    reaches_staging: bool = False


@dataclass(frozen=True, slots=True)
class PeerMoved:
    """Since the last look bytes have moved to or from a peer, of tickets that are still open."""

    peer: Remote


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
class HandshakeRefused:
    """Whoever listens at the address of a peer has ended our connection's handshake: it does not hold our token, or is
    another program."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class HostSilent:
    """The host of a peer has answered none of several attempts to connect, neither with yes nor with no."""

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
    """A slot of staging memory is ours until Release. `error` says why it can never be; empty when it is. With
    `is_peer_slot` it is the target's own, at `address` in this process: what is gathered into it is there."""

    key: SlotKey
    address: int
    error: str = ""
    is_peer_slot: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """A gather or a scatter has ended; `error` is empty when every byte is where it should be."""

    key: SlotKey
    error: str
