"""One claim that a source carries out itself: it writes, and says how far it is whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.plan.programs.copies import Copies
from kvferry.session.state_machine import StateMachine, TransitionTable
from kvferry.wire.messages import Grant, Reason, Refusal, Written


class WriteState(StrEnum):
    GRANTED = "granted"
    WRITING = "writing"
    WRITTEN = "written"
    DRAINING = "draining"
    ENDED = "ended"
    BROKEN = "broken"


WRITE_TABLE: TransitionTable = {
    (WriteState.GRANTED, "posted"): WriteState.WRITING,
    (WriteState.GRANTED, "ticket failed"): WriteState.ENDED,
    (WriteState.GRANTED, "lease ended"): WriteState.ENDED,
    (WriteState.WRITING, "ticket ended"): WriteState.WRITTEN,
    (WriteState.WRITING, "ticket failed"): WriteState.BROKEN,
    (WriteState.WRITING, "lease ended"): WriteState.DRAINING,
    (WriteState.DRAINING, "ticket ended"): WriteState.ENDED,
    (WriteState.DRAINING, "ticket failed"): WriteState.BROKEN,
}


@dataclass(slots=True)
class SingleWrite:
    """A ticket of ours. `peer` names whom to answer, `error` says what the transport did not manage. One that is only
    granted is not planned yet: its target should hear of it first, as it has something to do itself.

    With `is_aborted` the target waits to hear that nothing is written any more.
    """

    claim_id: str
    peer: str
    machine: StateMachine
    num_bytes: int = 0
    num_rows: int = 0
    error: str = ""
    is_aborted: bool = False

    @classmethod
    def granted(cls, claim_id: str, peer: str) -> SingleWrite:
        """One of which nothing is posted yet."""
        return cls(claim_id, peer, StateMachine(f"write of {claim_id}", WRITE_TABLE, WriteState.GRANTED))

    @classmethod
    def started(cls, claim_id: str, peer: str, copies: Copies) -> SingleWrite:
        """One whose ticket is posted now."""
        write = cls.granted(claim_id, peer)
        write.posted(copies)
        return write

    def posted(self, copies: Copies) -> None:
        """Its ticket is posted now."""
        self.machine.move("posted")
        self.num_bytes, self.num_rows = copies.num_bytes, len(copies)

    @property
    def is_granted(self) -> bool:
        """Whether nothing has been posted yet."""
        return self.machine.state is WriteState.GRANTED

    @property
    def is_open(self) -> bool:
        """Whether our ticket may move bytes, out of our blocks and into the target's."""
        return self.machine.state in (WriteState.WRITING, WriteState.DRAINING)

    @property
    def is_written(self) -> bool:
        """Whether all bytes are there, as far as we know."""
        return self.machine.state is WriteState.WRITTEN

    @property
    def is_clean(self) -> bool:
        """Whether nothing that has been sent can be under way any more."""
        return self.machine.state in (WriteState.GRANTED, WriteState.WRITTEN, WriteState.ENDED)

    def ended(self, error: str) -> None:
        """The transport says that the ticket has ended."""
        self.error = error
        self.machine.move("ticket failed" if error else "ticket ended")

    def status(self) -> Grant | Written | Refusal:
        """Its progress, while its lease is live."""
        if self.is_open or self.is_granted:
            return Grant(self.claim_id, ())
        if self.is_written:
            return Written(self.claim_id, self.num_bytes, self.num_rows)
        return Refusal(Reason.TRANSPORT, "the write failed", self.error, "", self.claim_id)
