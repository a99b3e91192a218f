"""A lease: a source keeps a request's blocks for the readers that claim it, until all have them or it expires."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvferry.errors import TransferError
from kvferry.plan.digests.subject import NOTHING, Subject
from kvferry.plan.programs.copies import Direction
from kvferry.session.events import NOT_AHEAD, Ahead, LeaseProgress, LeaseRequest
from kvferry.session.keys import ClaimKey
from kvferry.session.source.direct_write import DirectWrite
from kvferry.session.source.packed_write import PackedWrite
from kvferry.session.state_machine import StateMachine, TransitionTable
from kvferry.wire.messages import Claim, FirstToken, Landed, Party, Reason


class LeaseState(StrEnum):
    OPEN = "open"
    CLAIMED = "claimed"
    DONE = "done"
    EXPIRED = "expired"
    ABORTED = "aborted"
    WITHDRAWN = "withdrawn"


LEASE_TABLE: TransitionTable = {
    (LeaseState.OPEN, "claim"): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, "claim"): LeaseState.CLAIMED,
    (LeaseState.CLAIMED, "all readers valid"): LeaseState.DONE,
    (LeaseState.OPEN, "deadline"): LeaseState.EXPIRED,
    (LeaseState.CLAIMED, "deadline"): LeaseState.EXPIRED,
    (LeaseState.OPEN, "abort"): LeaseState.ABORTED,
    (LeaseState.CLAIMED, "abort"): LeaseState.ABORTED,
    (LeaseState.OPEN, "withdraw"): LeaseState.WITHDRAWN,
    (LeaseState.CLAIMED, "withdraw"): LeaseState.WITHDRAWN,
}


@dataclass(frozen=True, slots=True)
class Granted:
    """A granted claim of a reader on so many tokens, and what is to be digested of them. With the direction `read` the
    reader sends `Landed` when it has everything."""

    claim_id: str
    direction: Direction
    subject: Subject
    num_tokens: int


@dataclass(slots=True)
class OwnDigest:
    """The source's own digest of what a reader gets; `values` once it is made. `peer` is whom to answer, empty as long
    as nobody has asked."""

    peer: str = ""
    values: tuple[bytes, ...] | None = None


@dataclass(slots=True)
class Lease:
    """`claims` has the claim of each reader: one attempt per reader, so that two are never taken for one repeated.
    `completed` has the digests that each reader was told, `digests` those that are being made, or wait to be asked for.
    `writes` are the claims that we carry out ourselves. `num_ready` tokens are computed, and of some states more
    (`ahead`); the claims in `waiting` need more tokens.

    A lease that has ended is kept until `deadline` as a tombstone, to give true answers to late messages. `ended_as`
    says how it ended; the engine has its blocks back (`is_freed`) once we write nothing out of them any more.
    """

    request: LeaseRequest
    machine: StateMachine
    deadline: float
    num_ready: int
    ahead: Ahead = NOT_AHEAD
    waiting: dict[Party, tuple[str, Claim]] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()
    claims: dict[Party, Granted] = field(default_factory=dict)
    completed: dict[Party, tuple[bytes, ...]] = field(default_factory=dict)
    digests: dict[ClaimKey, OwnDigest] = field(default_factory=dict)
    writes: dict[ClaimKey, PackedWrite | DirectWrite] = field(default_factory=dict)
    first_token: FirstToken | None = None
    ended_as: str = ""
    is_freed: bool = False

    @classmethod
    def opened(cls, request: LeaseRequest, deadline: float) -> Lease:
        """A lease that nobody has claimed yet."""
        machine = StateMachine(f"lease {request.lease_id}", LEASE_TABLE, LeaseState.OPEN)
        num_ready = 0 if request.is_growing else request.num_tokens
        return cls(request, machine, deadline, num_ready, first_token=request.first_token)

    @property
    def live(self) -> bool:
        """Whether the blocks still hold what was leased."""
        return self.machine.state in (LeaseState.OPEN, LeaseState.CLAIMED)

    @property
    def is_writing(self) -> bool:
        """Whether a ticket of ours may still read the blocks."""
        return any(write.is_open for write in self.writes.values())

    @property
    def is_read(self) -> bool:
        """Whether a reader with a granted claim has not confirmed yet that it has its bytes."""
        return len(self.claims) > len(self.completed)

    @property
    def is_computed(self) -> bool:
        """Whether the engine writes nothing to the blocks any more."""
        return self.num_ready == self.request.num_tokens

    @property
    def finished(self) -> bool:
        """Every expected reader of the claiming engine has said that its bytes are there, and the engine is done."""
        return self.is_computed and self.readers <= {party.rank for party in self.completed}

    def is_written(self, key: ClaimKey) -> bool:
        """Whether we have carried a claim out, to its last byte."""
        return key in self.writes and self.writes[key].is_written

    def has_granted(self, party: Party, claim_id: str) -> bool:
        """Whether this claim is the one that was granted to this reader."""
        return party in self.claims and self.claims[party].claim_id == claim_id

    def serves(self, party: Party) -> bool:
        """Whether this reader may count on the lease: it keeps it alive, or needs it no more. Before any claim, whoever
        knows its id may: the id, or the room that it is made from, is drawn at random."""
        return party in self.completed or (self.live and (not self.claims or party in self.claims))

    def claim(self, claim: Claim) -> None:
        """Note a granted claim; the same claim again changes nothing."""
        self.machine.move("claim")
        self.readers |= frozenset(claim.readers)
        self.claims.setdefault(claim.party, Granted(claim.claim_id, claim.direction, claim.subject, claim.num_tokens))

    def first_token_for(self, party: Party) -> FirstToken | None:
        """The token that follows the whole prompt. None for a reader of fewer tokens, which computes its own."""
        return self.first_token if self.claims[party].num_tokens == self.request.num_tokens else None

    def complete(self, party: Party, digests: tuple[bytes, ...]) -> None:
        """Note that a reader has its bytes, and the digests that it is told."""
        self.completed[party] = digests
        self.claims[party] = replace(self.claims[party], subject=NOTHING)

    def grow(self, event: LeaseProgress) -> None:
        """More tokens are computed. An event that goes backwards or too far is the engine's mistake, and is ignored."""
        before = self.num_ready, self.ahead.num_tokens, self.ahead.num_states
        after = event.num_ready, event.ahead.num_tokens, event.ahead.num_states
        if before < after and max(after[:2]) <= self.request.num_tokens:
            self.num_ready, self.ahead = event.num_ready, event.ahead
            self.request = replace(self.request, block_tables=event.block_tables)
            self.first_token = event.first_token

    def check(self, claim: Claim) -> None:
        """Raises TransferError for a claim that cannot be granted."""
        party, request = claim.party, self.request
        if not self.live:
            what, expected = "the lease has ended", "open or claimed"
            raise TransferError(Reason.EXPIRED, what, found=self.machine.state, expected=expected)
        if request.is_unnamed:
            what, expected = "engines cannot compare what this prompt depends on", "the source's log says why"
            raise TransferError(Reason.UNNAMED_PROMPT, what, found="a prompt without a name", expected=expected)
        others = {(other.engine_id, other.epoch) for other in self.claims}
        if others - {(party.engine_id, party.epoch)}:
            what = "another engine has claimed this lease"
            raise TransferError(Reason.ALREADY_CLAIMED, what, found=party.engine_id, expected="one engine")
        if party in self.claims and not self.has_granted(party, claim.claim_id):
            what = "another attempt has claimed this lease"
            raise TransferError(Reason.ALREADY_CLAIMED, what, found=claim.claim_id, expected="one attempt")
        if claim.direction is Direction.WRITE and party in self.completed:
            what = "this reader has already received the whole cache"
            raise TransferError(Reason.ALREADY_CLAIMED, what, found=claim.claim_id, expected="one claim")
        if claim.num_tokens > request.num_tokens:
            what, expected = "more tokens than were computed", f"at most {request.num_tokens}"
            raise TransferError(Reason.OUT_OF_RANGE, what, found=f"{claim.num_tokens} tokens", expected=expected)
        if not request.prompt.begins_with(claim.prompt, request.lease_id):
            what, found = "this is the cache of another prompt", f"another prompt of {claim.prompt.num_tokens} tokens"
            computed = f"the {request.prompt.num_tokens} tokens that were computed"
            expected = f"{computed}, or their beginning, with the same images, adapter and cache_salt"
            raise TransferError(Reason.WRONG_PROMPT, what, found=found, expected=expected)

    def check_landed(self, landed: Landed) -> None:
        """Raises TransferError where bytes that have landed must not be used, as they may be another request's."""
        if not self.has_granted(landed.party, landed.claim_id):
            what, found = "landed without a claim", landed.claim_id
            raise TransferError(Reason.NOT_CLAIMED, what, found=found, expected="a claim first")
        if landed.party in self.completed:
            return
        if not self.live:
            raise self.ended_error
        write = self.writes.get(ClaimKey(landed.lease_id, landed.party, landed.claim_id))
        if write is not None and not write.is_written:
            what = "landed before it was written"
            raise TransferError(Reason.NOT_CLAIMED, what, found="still being written", expected="written")

    @property
    def ended_error(self) -> TransferError:
        """What is said of a transfer or a digest during which the lease has ended."""
        what = "the lease expired before the transfer was confirmed"
        return TransferError(Reason.EXPIRED, what, found=self.machine.state, expected="live")
