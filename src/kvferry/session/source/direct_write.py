"""A claim that a source writes straight into the target's blocks: at once, or by stretches of tokens as they are
computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvferry.errors import TransferError
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import NOTHING, Direction
from kvferry.plan.programs.program import Program
from kvferry.plan.programs.program_split import Bundle
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import WHOLE, Stretch
from kvferry.plan.slots.slot_plan import StagedRequest
from kvferry.session.commands import Cancel, Command, Post
from kvferry.session.events import Acquired, Ahead, Staged, TicketEnded
from kvferry.session.keys import ClaimKey, SlotKey, WorkKey
from kvferry.session.refusals import refusal_of
from kvferry.wire.messages import Grant, Queued, Reason, Refusal, Written

MIN_AHEAD = 2
"""Fewer stretches than these are not sent state by state: they are sent faster than they are cut."""


@dataclass(slots=True)
class DirectWrite:
    """`peer` names whom to answer, `error` says what did not work. `todo` are the stretches that are not posted, `uses`
    the tickets that are open, in their order. `has_progressed`: one has ended, or its bytes have moved, since the
    target last asked. Its peer's bytes have moved since `moving_since`, and none of its tickets has ended; below 0 if
    not.

    With `bundles` of states, what is computed of some states is sent before the other states are: `cut` is the
    stretch that is sent so, and `cut_todo` what is not posted of it. `is_clean` says that nothing which was sent can be
    under way once no ticket is open. With `is_aborted` the target waits to hear that no ticket is open.
    """

    key: ClaimKey
    peer: str
    request: StagedRequest
    todo: list[Stretch]
    bundles: tuple[Bundle, ...] = ()
    cut: Stretch = WHOLE
    cut_todo: list[Bundle] = field(default_factory=list)
    uses: dict[WorkKey, None] = field(default_factory=dict)
    num_posted: int = 0
    num_bytes: int = 0
    num_rows: int = 0
    has_progressed: bool = False
    moving_since: float = -1.0
    error: str = ""
    is_clean: bool = True
    is_aborted: bool = False

    @property
    def is_open(self) -> bool:
        """Whether something is written, or will be."""
        return bool(self.uses or self.todo or self.cut_todo)

    @property
    def is_written(self) -> bool:
        """Whether all bytes are there, as far as we know."""
        return not self.is_open and not self.error

    def status(self) -> Grant | Queued | Written | Refusal:
        """Its progress, while its lease is live. `Queued` keeps the target waiting: a prefill may do so, and bytes that
        move, not a write that hangs."""
        if self.error:
            error = TransferError(Reason.TRANSPORT, "the write failed", found=self.error)
            return refusal_of(error, self.key.claim_id)
        has_progressed, self.has_progressed = self.has_progressed, False
        if self.is_open and (has_progressed or not self.uses):
            return Queued(self.key.claim_id)
        if self.is_open:
            return Grant(self.key.claim_id, ())
        return Written(self.key.claim_id, self.num_bytes, self.num_rows)

    def grown(self, block_tables: tuple[tuple[int, ...], ...], num_ready: int, ahead: Ahead) -> Iterator[Command]:
        """Post what is ready. Raises what planning it raises."""
        self.request = replace(self.request, source_tables=block_tables)
        yield from self._post_bundles(num_ready, ahead)
        while self.todo and self._end(self.todo[0]) <= num_ready:
            yield self._post(self.request.program, self.todo.pop(0))
        if not self.cut_todo and self._begin_cut(ahead.num_tokens):
            yield from self._post_bundles(num_ready, ahead)

    def _begin_cut(self, num_tokens: int) -> bool:
        """Begin to send the stretches by bundles of states of which only some states are computed, if they are
        enough."""
        started = [stretch for stretch in self.todo if self._end(stretch) <= num_tokens]
        if not self.bundles or len(started) < MIN_AHEAD:
            return False
        del self.todo[: len(started)]
        self.cut = Stretch(TokenRange(started[0].tokens.first, started[-1].tokens.last), started[-1].is_last)
        self.cut_todo = list(self.bundles)
        return True

    def _post_bundles(self, num_ready: int, ahead: Ahead) -> Iterator[Command]:
        is_ready = self._end(self.cut) <= num_ready
        num_states = ahead.num_states if self._end(self.cut) <= ahead.num_tokens else 0
        while self.cut_todo and (is_ready or self.cut_todo[0].num_states <= num_states):
            yield self._post(self.cut_todo.pop(0).program, self.cut)

    @property
    def _num_tokens(self) -> int:
        return max((tokens.last for tokens in self.request.ranges), default=0)

    def _end(self, stretch: Stretch) -> int:
        """How many tokens must be there. The last stretch ends with the request."""
        return min(stretch.tokens.last, self._num_tokens)

    def _post(self, program: Program, stretch: Stretch) -> Post:
        request, copies = self.request, NOTHING
        if self._num_tokens:
            copies = copies_for(program, request.source_tables, request.target_tables, request.ranges, stretch)
        self.num_bytes += copies.num_bytes
        self.num_rows += len(copies)
        key = SlotKey(self.key, stretch=self.num_posted, number=0)
        self.num_posted += 1
        self.uses[key] = None
        return Post(key, copies, Direction.WRITE)

    def handle(self, event: Acquired | Staged | TicketEnded) -> Iterator[Command]:
        """A ticket has ended, well or not; nothing else concerns it."""
        if not isinstance(event, TicketEnded):
            return
        self.uses.pop(event.key, None)
        self.is_clean = self.is_clean and not event.error
        self.has_progressed, self.moving_since = True, -1.0
        if event.error:
            yield from self.fail(event.error)

    def fail(self, error: str) -> Iterator[Command]:
        """Begin nothing more, and wait for what is in flight."""
        is_stopped, self.error = bool(self.error), self.error or error
        self.todo.clear()
        self.cut_todo.clear()
        for key in self.uses if not is_stopped else ():
            yield Cancel(key)
