"""One fetch: the reads of one request from all its source ranks, and when each phase began.

A read is one part of a fetch, whoever moves its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import TransferError
from kvferry.plan.digests.extractor import Extract
from kvferry.plan.digests.subject import NOTHING, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.plan.slots.slot_plan import SlotPlan
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Command, FetchReport
from kvferry.session.events import FetchRequest
from kvferry.session.keys import PeerKey, ReadKey
from kvferry.session.state_machine import StateMachine, TransitionTable
from kvferry.session.target.read_strategy import TransferMode
from kvferry.session.target.reads.slot_pipeline import SlotPipeline
from kvferry.session.timing import Timing
from kvferry.wire.messages import FirstToken, Party, Reason


class ReadState(StrEnum):
    CLAIMING = "claiming"
    EXPOSED = "exposed"
    MOVING = "moving"
    LANDED = "landed"
    DIGESTED = "digested"
    CONFIRMED = "confirmed"
    VALID = "valid"
    DRAINING = "draining"
    FAILED = "failed"


READ_TABLE: TransitionTable = {
    (ReadState.CLAIMING, "granted"): ReadState.MOVING,
    (ReadState.EXPOSED, "granted"): ReadState.MOVING,
    (ReadState.EXPOSED, "ticket ended"): ReadState.LANDED,
    (ReadState.MOVING, "ticket ended"): ReadState.LANDED,
    (ReadState.LANDED, "digested"): ReadState.DIGESTED,
    (ReadState.LANDED, "valid"): ReadState.CONFIRMED,
    (ReadState.DIGESTED, "valid"): ReadState.VALID,
    (ReadState.CONFIRMED, "digested"): ReadState.VALID,
    (ReadState.CLAIMING, "fail"): ReadState.FAILED,
    (ReadState.EXPOSED, "fail"): ReadState.DRAINING,
    (ReadState.MOVING, "fail"): ReadState.DRAINING,
    (ReadState.LANDED, "fail"): ReadState.FAILED,
    (ReadState.DIGESTED, "fail"): ReadState.FAILED,
    (ReadState.CONFIRMED, "fail"): ReadState.FAILED,
    (ReadState.VALID, "fail"): ReadState.FAILED,
    (ReadState.DRAINING, "ticket ended"): ReadState.FAILED,
}


OPEN = (ReadState.EXPOSED, ReadState.MOVING, ReadState.DRAINING)
"""States in which bytes may come."""
UNGRANTED = (ReadState.CLAIMING, ReadState.EXPOSED)
"""States in which a read waits for its grant."""
ASKING = (ReadState.LANDED, ReadState.DIGESTED)
"""States in which a read waits to hear whether its bytes are valid."""
WAITING = (*UNGRANTED, ReadState.MOVING, *ASKING)
"""States in which a read needs its source to be alive."""
LEASED = (ReadState.MOVING, *ASKING)
"""States in which a read needs its lease."""


def _movers(mode: TransferMode) -> set[Direction]:
    """The directions of the tickets that bring a read's bytes directly into their blocks."""
    theirs = {Direction.WRITE} if mode.writes_to_blocks else set()
    return theirs | ({Direction.READ} if mode.direction is Direction.READ else set())


@dataclass(slots=True)
class Read:
    """What one fetch reads from one source rank.

    `mode` says who moves the bytes; `movers` are those that still move them directly into blocks: we (read), the source
    (write), or both. With another `strategy` than direct, they go through the slots of `pipeline`, which is there once
    the source has granted the claim; `plans` has what is planned before that. `subject` is what is digested, `extracts`
    where it lies here, once it `is_prepared`, and `ours` and `theirs` are the digests. With `is_confirmed` a source
    that writes has confirmed the read before all bytes were in their blocks. `access` is whose access it is written by,
    where that can be revoked. `granted_at` is when the claim was granted, `progressed_at` when the read last made
    progress, and `moved_at` when it did or had a reason to wait.
    """

    machine: StateMachine
    last_sent: float
    mode: TransferMode
    strategy: Strategy
    movers: set[Direction]
    plans: tuple[SlotPlan, ...] = ()
    pipeline: tuple[SlotPipeline, ...] = ()
    num_bytes: int = 0
    num_rows: int = 0
    subject: Subject = NOTHING
    extracts: tuple[Extract, ...] = ()
    is_prepared: bool = False
    may_prepare: bool = True
    is_confirmed: bool = False
    access: Party | None = None
    ours: tuple[bytes, ...] = ()
    theirs: tuple[bytes, ...] = ()
    granted_at: float = 0.0
    moved_at: float = 0.0
    progressed_at: float = 0.0

    @classmethod
    def started(cls, name: str, mode: TransferMode, subject: Subject, now: float) -> Read:
        """A read that is about to be claimed. A source that writes to blocks may do so from that moment on."""
        first = ReadState.EXPOSED if mode.writes_to_blocks else ReadState.CLAIMING
        return cls(StateMachine(name, READ_TABLE, first), now, mode, mode.strategy, _movers(mode), subject=subject)

    @property
    def direction(self) -> Direction:
        """The claim's direction. A source that writes all confirms the read unasked; others are asked with `Landed`."""
        return self.mode.direction

    @property
    def state(self) -> StrEnum:
        return self.machine.state

    @property
    def is_moved_by_source(self) -> bool:
        """Whether the source itself still moves bytes, and so notices when they cannot be moved."""
        return self.strategy.source_gathers or Direction.WRITE in self.movers

    @property
    def is_exposed(self) -> bool:
        """Whether the source may write to our blocks, or to our staging memory, for all we know."""
        if self.strategy.is_staged:
            return any(pipeline.is_exposed for pipeline in self.pipeline)
        return Direction.WRITE in self.movers

    @property
    def is_open(self) -> bool:
        """Whether bytes may come, or are waited for."""
        return self.state in OPEN

    @property
    def may_change_blocks(self) -> bool:
        """Of a failed read, whether bytes may come into the blocks themselves; staged ones do only by a scatter, which
        is ours."""
        return self.is_open and (not self.strategy.is_staged or any(each.is_scattering for each in self.pipeline))

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Whether bytes are awaited, and for `limit_s` none have come and there was no reason to wait."""
        return self.state is ReadState.MOVING and now - max(self.granted_at, self.moved_at) > limit_s

    @property
    def awaits_slots(self) -> bool:
        """Whether it only waits for staging memory."""
        return any(pipeline.awaits_slots for pipeline in self.pipeline)

    @property
    def awaits_tokens(self) -> bool:
        """Whether it only waits for tokens that are not computed yet."""
        return any(pipeline.awaits_tokens for pipeline in self.pipeline)

    @property
    def awaits_turn(self) -> bool:
        """Whether something is to be done at once that had to wait until our messages were sent."""
        return self.awaits_plans or self.awaits_digest

    @property
    def awaits_plans(self) -> bool:
        """Whether slots and digests can be planned while the grant is awaited."""
        return self.may_prepare and self.state in UNGRANTED

    @property
    def awaits_digest(self) -> bool:
        """Whether everything has landed, and our own digest is not begun."""
        return self.is_digesting and not self.is_prepared

    @property
    def is_digesting(self) -> bool:
        """Whether our own digest is still awaited."""
        return bool(self.subject.parts) and self.state in (ReadState.LANDED, ReadState.CONFIRMED)

    def ended(self, mover: Direction) -> None:
        """The ticket of one mover has ended, well or not."""
        self.movers.discard(mover)
        if not self.movers:
            self.machine.move("ticket ended")

    def differing(self) -> tuple[str, ...]:
        """The states whose bytes differ from the source's; all of them when digests are missing."""
        names = self.subject.names
        if len(self.ours) != len(self.theirs):
            return names or ("the request is empty",)
        pairs = zip(names, self.ours, self.theirs, strict=True)
        return tuple(dict.fromkeys(name for name, ours, theirs in pairs if ours != theirs))


@dataclass(slots=True)
class Fetch:
    """One wanted cache. `reads` is empty until every source rank has been met and the route is known.

    `granted_at` is when the first source granted its claim, `landed_at` when the last bytes were there.
    `verified` says by what digest.

    A failed fetch is forgotten when no ticket of it is open any more. Its blocks are in quarantine until none can
    change them: then it `is_released`, which slots of staging memory may wait for longer.
    """

    request: FetchRequest
    peers: tuple[PeerKey, ...]
    began: float
    failed: bool = False
    is_released: bool = False
    reads: dict[PeerKey, Read] = field(default_factory=dict)
    claimed_at: float = 0.0
    granted_at: float = 0.0
    landed_at: float = 0.0
    verified: str = "off"
    first_token: FirstToken | None = None

    def start_reads(self, modes: dict[PeerKey, TransferMode], subjects: dict[PeerKey, Subject], now: float) -> None:
        """One read per source rank that holds something we need."""
        self.claimed_at = now
        for peer, mode in modes.items():
            self.reads[peer] = Read.started(f"read of {self.request.request_id} from {peer}", mode, subjects[peer], now)

    def granted(self, read: Read, now: float) -> None:
        """One of its sources has granted its claim, or has moved the bytes."""
        self.granted_at = self.granted_at or now
        read.granted_at = now

    def key(self, peer: PeerKey) -> ReadKey:
        """The name of the read from a peer."""
        return ReadKey(self.request.claim_id, peer)

    def all_in(self, *states: ReadState) -> bool:
        """Whether the reads have begun and each is in one of these states."""
        return bool(self.reads) and all(read.state in states for read in self.reads.values())

    @property
    def has_open_tickets(self) -> bool:
        return any(read.is_open for read in self.reads.values())

    @property
    def may_change_blocks(self) -> bool:
        """Whether a ticket may still bring bytes into its blocks."""
        return any(read.may_change_blocks for read in self.reads.values())

    def overdue(self, timing: Timing, now: float) -> tuple[TransferError, ...]:
        """Why it takes too long; empty while it does not. Progress of one read is no reason to wait for another."""
        if self.failed:
            return ()
        limit_s = timing.handshake_s + timing.transfer_s
        open_reads = [read for read in self.reads.values() if read.state is not ReadState.VALID]
        moved_at = min((read.moved_at for read in open_reads), default=self.began)
        if now - max(self.began, moved_at) > limit_s:
            return (TransferError(Reason.DEADLINE, f"the fetch took longer than {limit_s:g} s"),)
        if any(read.is_stalled(now, timing.transfer_s) for read in open_reads):
            return (TransferError(Reason.DEADLINE, f"the read took longer than {timing.transfer_s:g} s"),)
        return ()

    def report(self, transport: str, choice: str, now: float) -> FetchReport:
        """The finished fetch in figures."""
        return FetchReport(
            tokens=max(map(len, self.request.ranges), default=0),
            num_bytes=sum(read.num_bytes for read in self.reads.values()),
            num_rows=sum(read.num_rows for read in self.reads.values()),
            transport=transport,
            choice=choice,
            strategy="+".join(sorted({read.strategy for read in self.reads.values()})) or Strategy.DIRECT,
            phases_s={
                "handshake": self.claimed_at - self.began,
                "claim": self.granted_at - self.claimed_at,
                "wire": self.landed_at - self.granted_at,
                "verify": now - self.landed_at,
            },
            verified=self.verified,
            first_token=self.first_token,
        )


def is_needed(peer: PeerKey, fetches: Mapping[str, Fetch]) -> bool:
    """Whether a read needs this source to be alive."""
    return any(fetch.reads[peer].state in WAITING for fetch in fetches.values() if peer in fetch.reads)


def needed_peers(fetches: Mapping[str, Fetch]) -> list[PeerKey]:
    """All sources that a read needs to be alive, each once."""
    reads = (item for fetch in fetches.values() for item in fetch.reads.items())
    return list(dict.fromkeys(key for key, read in reads if read.state in WAITING))


def reads_of(fetches: Mapping[str, Fetch], key: PeerKey, claim_id: str, *states: ReadState) -> list[tuple[Fetch, Read]]:
    """The read of a claim from a peer, if it is in one of the states; late and repeated answers match none."""
    fetch = fetches.get(claim_id)
    if fetch is None or key not in fetch.reads or fetch.reads[key].state not in states:
        return []
    return [(fetch, fetch.reads[key])]


@dataclass(frozen=True, slots=True)
class FetchBroken:
    """A fetch that cannot go on, and why."""

    fetch: Fetch
    error: TransferError


Step = Command | FetchBroken
"""What follows from an event: a command, or that a fetch cannot go on."""
