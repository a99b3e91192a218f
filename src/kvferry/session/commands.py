"""Everything that comes out of a session: what its owner has to do, and what the engine is told. The events that answer
commands are in `events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.errors import TransferError
from kvferry.plan.digests.extractor import Extract
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.tiles import Tile
from kvferry.session.keys import PeerKey, Remote, SlotKey, WorkKey
from kvferry.wire.messages import FirstToken, Message, Offer, Party, TargetOffer


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer that we address. If it `is_anew`, that is over a new connection: what was sent over the
    older one may get lost. A `TargetOffer` gives the source named by `access` access of its own, where a transport can
    revoke it."""

    peer: PeerKey
    message: Message
    is_anew: bool = False
    access: Party | None = None


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
class Revoke:
    """Take the access that a source was given with our offer: nothing that it has written by it, or will write, arrives
    any more once this is done. The next offer gives it another one."""

    source: Party


@dataclass(frozen=True, slots=True)
class CheckLiveness:
    """Find out whether anybody still listens at the address of a silent peer; answer with PeerGone if
    not, and with HostSilent if its host says nothing at all."""

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
    """Get in line for a slot of staging memory; answer with Acquired. `peer_address` is where the target wants the
    gathered bytes, 0 for a slot that is scattered from."""

    key: SlotKey
    num_bytes: int
    peer_address: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Give a slot back, or leave the line: Acquired is not awaited any more."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Stage:
    """Gather from our blocks into a slot, or scatter from a slot into our blocks; answer with Staged."""

    key: SlotKey
    tiles: tuple[Tile, ...]


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
    cannot read the memory of one side. `first_token` is what the source has sampled after the prompt, if it says so.
    """

    tokens: int
    num_bytes: int
    num_rows: int
    transport: str
    choice: str
    strategy: str
    phases_s: Mapping[str, float] = field(default_factory=dict)
    verified: str = "off"
    first_token: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The cache is there and valid: the request may be decoded."""

    request_id: str
    report: FetchReport


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The cache did not arrive. Its blocks stay in quarantine until BlocksReleased."""

    request_id: str
    error: TransferError


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """No ticket, ours or the source's, touches the blocks of a failed fetch any more: they may be used again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Nobody will read the blocks of a leased request any more, nor do we; `reason` says how it ended."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """One incarnation of another engine, and the control address of each of its ranks."""

    engine_id: str
    epoch: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """The engine at the address that was asked for: of `data_parallel_size` engines, the one with this number."""

    address: str
    engine: RemoteEngine
    number: int = 0
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class LocateFailed:
    """No engine has said in time that the address is its own, or the one that did cannot be used."""

    address: str
    error: TransferError
    number: int = 0


@dataclass(frozen=True, slots=True)
class AgentStopped:
    """The agent, not a session, says that it moves nothing any more: this is its last notice.

    A source that was writing when this happened may still do so: the blocks of such fetches stay in quarantine for
    the rest of the process's life.
    """


@dataclass(frozen=True, slots=True)
class Count:
    """Something worth a counter: `what` names it, `reason` labels it."""

    what: str
    reason: str


_ToPeer = Send | Reply
_OfTransport = Connect | Disconnect | Revoke | CheckLiveness | Post | Cancel
_OfMemory = Acquire | Release | Stage | Digest | DropDigest
_ToEngine = Fetched | FetchFailed | BlocksReleased | LeaseEnded | Located | LocateFailed
Command = _ToPeer | _OfTransport | _OfMemory | _ToEngine | Count
