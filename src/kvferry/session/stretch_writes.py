"""A claim that a source writes straight into the target's blocks, stretch by stretch, as its tokens are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvferry.plan.copies import Direction
from kvferry.plan.request import copies_for
from kvferry.plan.slots import StagedRequest
from kvferry.plan.stretch import Stretch, stretch_tokens, stretches
from kvferry.session.events import Cancel, ClaimKey, Command, Post, SlotKey, TicketEnded
from kvferry.wire.messages import Grant, Queued, Reason, Refusal, Written

__all__ = ["STRETCH_BYTES", "StretchWrites"]

STRETCH_BYTES = 4 << 20


@dataclass(slots=True)
class StretchWrites:
    """`peer` names whom to answer. `todo` are the stretches that are not posted, `uses` the tickets that are open; what
    is said of a `Write` is true of this."""

    key: ClaimKey
    peer: str
    request: StagedRequest
    todo: list[tuple[int, Stretch]]
    uses: set[SlotKey] = field(default_factory=set)
    num_bytes: int = 0
    num_rows: int = 0
    error: str = ""
    is_clean: bool = True
    is_aborted: bool = False

    @classmethod
    def begun(cls, key: ClaimKey, peer: str, request: StagedRequest, stretch_bytes: int) -> StretchWrites:
        """One of which nothing is posted yet; a ticket writes about `stretch_bytes`."""
        cuts = stretches(request.ranges, stretch_tokens(request.program, stretch_bytes))
        return cls(key, peer, request, list(enumerate(cuts)))

    @property
    def claim_id(self) -> str:
        return self.key.claim_id

    @property
    def is_open(self) -> bool:
        """Whether something is written, or will be."""
        return bool(self.uses or self.todo)

    @property
    def is_written(self) -> bool:
        return not self.is_open and not self.error

    def word(self) -> Grant | Queued | Written | Refusal:
        """How far it is, while its lease is live. A target need not be patient with a write, but with a prefill."""
        if self.error:
            return Refusal(Reason.TRANSPORT, "the write failed", self.error, "", self.claim_id)
        if self.todo and not self.uses:
            return Queued(self.claim_id)
        if self.is_open:
            return Grant(self.claim_id, ())
        return Written(self.claim_id, self.num_bytes, self.num_rows)

    def grown(self, block_tables: tuple[tuple[int, ...], ...], num_ready: int) -> Iterator[Command]:
        """Post what has become ready. Raises what planning it raises."""
        self.request = request = replace(self.request, source_tables=block_tables)
        last = max(tokens.last for tokens in request.ranges)
        while self.todo and min(self.todo[0][1].tokens.last, last) <= num_ready:
            number, stretch = self.todo.pop(0)
            tables = block_tables, request.target_tables
            copies = copies_for(request.program, *tables, request.ranges, stretch)
            self.num_bytes += copies.num_bytes
            self.num_rows += len(copies)
            self.uses.add(SlotKey(self.key, stretch=number, number=0))
            yield Post(SlotKey(self.key, stretch=number, number=0), copies, Direction.WRITE)

    def ticket_ended(self, event: TicketEnded) -> Iterator[Command]:
        """A stretch is written, or is not."""
        self.uses -= {key for key in self.uses if key == event.key}
        self.is_clean = self.is_clean and not event.error
        if event.error:
            yield from self.fail(event.error)

    def fail(self, error: str) -> Iterator[Command]:
        """Begin nothing more, and wait for what is under way."""
        is_known, self.error = bool(self.error), self.error or error
        self.todo.clear()
        for key in sorted(self.uses, key=lambda key: key.stretch) if not is_known else ():
            yield Cancel(key)
