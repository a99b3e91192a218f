"""The source's side of a packed claim: slots that the target asks for are gathered and written to it, each once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.plan.programs.copies import Direction
from kvferry.plan.slots.slot_plan import Slot, SlotPlan, StagedRequest
from kvferry.plan.strategy.strategies import Side
from kvferry.session.commands import Acquire, Cancel, Command, Post, Release, Reply, Stage
from kvferry.session.events import Acquired, Staged, TicketEnded
from kvferry.session.keys import ClaimKey, SlotKey, WorkKey
from kvferry.session.refusals import refusal_of
from kvferry.session.slot import SlotState, SlotUse
from kvferry.wire.messages import Grant, Pack, Packed, Queued, Reason, Refusal, Renewed


@dataclass(slots=True)
class PackedWrite:
    """One claim of `num_bytes`. `peer` names whom to answer, `error` says what did not work, `done` are the slots that
    are written, `num_written_bytes` together.

    With `is_aborted` the target waits to hear that nothing is written any more.
    """

    key: ClaimKey
    peer: str
    request: StagedRequest
    plan: SlotPlan
    num_bytes: int
    num_ready: int
    uses: dict[WorkKey, SlotUse] = field(default_factory=dict)
    done: set[SlotKey] = field(default_factory=set)
    num_written_bytes: int = 0
    error: str = ""
    is_clean: bool = True
    is_aborted: bool = False

    @classmethod
    def started(cls, key: ClaimKey, peer: str, request: StagedRequest, num_ready: int) -> PackedWrite:
        """One of which nothing is asked for yet. Raises BlockTableError for ranges that cannot be."""
        plan = SlotPlan(request, Side.SOURCE, num_ready)
        return cls(key, peer, request, plan, plan.num_bytes, num_ready)

    @property
    def is_open(self) -> bool:
        """Whether something still looks at the blocks or moves bytes to the target."""
        return bool(self.uses)

    @property
    def is_written(self) -> bool:
        """Whether everything is there."""
        return self.num_written_bytes == self.num_bytes

    def status(self) -> Grant | Refusal:
        """Its progress, while its lease is live."""
        if self.error:
            error = TransferError(Reason.TRANSPORT, "a slot could not be written", found=self.error)
            return refusal_of(error, self.key.claim_id)
        return Grant(self.key.claim_id, (), self._num_missing)

    @property
    def _num_missing(self) -> int:
        return max(0, self.plan.num_tokens - self.num_ready)

    def prepare(self) -> None:
        """Plan the first slot, which will be asked for soon; errors are reported then."""
        if not self.error and self.plan.tokens_for(0) <= self.num_ready:
            with suppress(FerryError):
                self.plan.slots(0)

    def pack(self, message: Pack, peer: str, is_advancing: bool) -> Iterator[Command]:
        """Gather and write a slot, once; a repeated request is answered with its progress, whatever address it has. A
        target that waits for a slot of ours is told to wait only while other slots make progress (`is_advancing`).

        Raises RequestError for a slot that does not exist.
        """
        self.peer = peer
        key = SlotKey(self.key, message.stretch, message.number)
        if self.error or key in self.done or key in self.uses:
            yield Reply(peer, self._how_far(key, is_advancing))
        elif not self._is_ready(key):
            # The target was told how many tokens are missing, and will ask again.
            yield Reply(peer, Queued(self.key.claim_id))
        else:
            use = self.uses[key] = SlotUse.started(key, self._slot(key), message.address)
            yield Acquire(key, use.slot.num_bytes, use.peer_address)

    def _how_far(self, key: SlotKey, is_advancing: bool) -> Packed | Grant | Refusal | Queued | Renewed:
        """The answer for a slot that was asked for before, and for every slot once the claim has failed."""
        if key in self.done:
            return self._packed(key)
        if self.error:
            return self.status()
        is_waiting = self.uses[key].state is SlotState.WAITING
        return Queued(self.key.claim_id) if is_waiting and is_advancing else Renewed(())

    def _is_ready(self, key: SlotKey) -> bool:
        """Whether the tokens of a slot are computed; of one that does not exist, there is nothing to wait for."""
        return key.stretch >= len(self.plan.stretches) or self.plan.tokens_for(key.stretch) <= self.num_ready

    def grown(self, block_tables: tuple[tuple[int, ...], ...], num_ready: int) -> Iterator[Command]:
        """More tokens are computed: tell the target, which asks only for slots of tokens that are."""
        self.num_ready = num_ready
        self.request = replace(self.request, source_tables=block_tables)
        self.plan = SlotPlan(self.request, Side.SOURCE, num_ready)
        yield Reply(self.peer, self.status())

    def _slot(self, key: SlotKey) -> Slot:
        num_stretches = len(self.plan.stretches)
        if key.stretch < num_stretches and key.number < len(slots := self.plan.slots(key.stretch)):
            return slots[key.number]
        found = f"slot {key.number} of stretch {key.stretch}"
        raise RequestError("unknown staging slot", found=found, expected=f"one of {num_stretches} stretches")

    def is_peer_slot(self, event: Acquired | Staged | TicketEnded) -> bool:
        """Whether an event is about a slot of the target's own."""
        return self.uses[event.key].is_peer_slot or (isinstance(event, Acquired) and event.is_peer_slot)

    def handle(self, event: Acquired | Staged | TicketEnded) -> Iterator[Command]:
        """One of its slots is acquired, gathered or written, or cannot be."""
        use = self.uses[event.key]
        if isinstance(event, Acquired):
            yield from self._acquired(use, event)
            return
        self.is_clean = self.is_clean and not (isinstance(event, TicketEnded) and event.error)
        if use.state is SlotState.DRAINING or event.error:
            yield from self._over(use, event.error)
        elif isinstance(event, TicketEnded):
            yield from self._written(use)
        else:
            yield from self._gathered(use)

    def _acquired(self, use: SlotUse, event: Acquired) -> Iterator[Command]:
        """A slot is ours: gather. Without one the claim cannot be carried out."""
        if event.error:
            del self.uses[use.key]
            yield from self.fail(event.error)
            return
        use.machine.move("acquired")
        use.address, use.is_peer_slot = event.address, event.is_peer_slot
        yield Stage(use.key, use.gather)

    def _gathered(self, use: SlotUse) -> Iterator[Command]:
        """On the wire with it, unless that was into the target's own slot."""
        use.machine.move("filled")
        if use.is_peer_slot:
            yield from self._written(use)
        else:
            yield Post(use.key, use.slot.wire.shifted(use.address, use.peer_address), Direction.WRITE)

    def _written(self, use: SlotUse) -> Iterator[Command]:
        """It is in the target's slot."""
        use.machine.move("emptied")
        del self.uses[use.key]
        self.done.add(use.key)
        self.num_written_bytes += use.slot.num_bytes
        if self.is_written:
            self.plan.forget()
        yield Release(use.key)
        yield Reply(self.peer, self._packed(use.key))

    def _packed(self, key: SlotKey) -> Packed:
        return Packed(self.key.claim_id, key.stretch, key.number, self._num_missing)

    def _over(self, use: SlotUse, error: str) -> Iterator[Command]:
        """Release a slot that was not written."""
        del self.uses[use.key]
        yield Release(use.key)
        if error:
            yield from self.fail(error)

    def fail(self, error: str) -> Iterator[Command]:
        """Begin nothing more, and wait for what is in flight."""
        self.error = self.error or error
        self.plan.forget()
        for use in list(self.uses.values()):
            if use.state is SlotState.EMPTYING:
                yield Cancel(use.key)
            if use.fail():
                del self.uses[use.key]
                yield Release(use.key)
