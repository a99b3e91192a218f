"""The target's side of a staged read: a few slots at a time are filled over the wire and scattered into the blocks.

With `scatter` the target fills its slots itself, with runs of the source's blocks. With `pack` it tells the source
where each slot is, and the source writes there what it has gathered. Each slot is given to a source once, and is the
source's to write to until it has written it or is known to write no more. So no slot is acquired for tokens that are
not computed yet: nobody else could use it meanwhile, and that may take long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvferry.plan.programs.copies import Direction
from kvferry.plan.slots.slot_plan import Slot, SlotPlan
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Acquire, Cancel, Command, Post, Release, Send, Stage
from kvferry.session.keys import ReadKey, SlotKey
from kvferry.session.slot import SlotState, SlotUse
from kvferry.wire.messages import Pack, Party

# One is gathered, one is on the wire, one is scattered, and one waits between two of these stages.
WINDOW = 4


class SlotPipeline:
    """The slots of one read. `names` are the lease's id and our own party, for messages to the source; `num_missing`
    tokens are not computed yet."""

    def __init__(
        self, key: ReadKey, plan: SlotPlan, strategy: Strategy, names: tuple[str, Party], num_missing: int
    ) -> None:
        self._key = key
        self._strategy = strategy
        self._lease_id, self._ours = names
        self._plan = plan
        self._num_ready = max(0, plan.num_tokens - num_missing)
        self._open: dict[SlotKey, SlotUse] = {}
        # Slots that were not asked for yet, all of one stretch, and the stretches that follow.
        self._todo: deque[tuple[SlotKey, Slot]] = deque()
        self._stretches = deque(range(len(plan.stretches)))
        self.num_bytes = 0
        self.num_rows = 0

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._open

    @property
    def is_open(self) -> bool:
        """Whether a slot is waited for or in use."""
        return bool(self._open)

    @property
    def is_done(self) -> bool:
        """Whether every byte is in its place."""
        return not (self._open or self._todo or self._stretches)

    @property
    def awaits_tokens(self) -> bool:
        """Whether it only waits for tokens that are not computed, as far as we know."""
        return bool(self._todo) and not self._open

    @property
    def awaits_slots(self) -> bool:
        """Whether it only waits for slots, which others have."""
        return bool(self._open) and all(use.state is SlotState.WAITING for use in self._open.values())

    @property
    def is_exposed(self) -> bool:
        """Whether the source may be writing to a slot, for all we know."""
        return any(self._may_be_written(use) for use in self._open.values())

    def _may_be_written(self, use: SlotUse) -> bool:
        is_filling = use.state is SlotState.FILLING or (use.state is SlotState.DRAINING and not use.was_emptying)
        return self._strategy.source_gathers and is_filling

    def go_on(self) -> Iterator[Command]:
        """Ask for the next slots of what is computed. Raises what planning them raises."""
        while len(self._open) < WINDOW and self._has_more():
            key, slot = self._todo.popleft()
            self._open[key] = SlotUse.started(key, slot)
            yield Acquire(key, slot.num_bytes)

    def _has_more(self) -> bool:
        """Whether there is a slot to ask for; plans the next stretch, which may have none."""
        while self._stretches and not self._todo:
            stretch = self._stretches.popleft()
            slots = enumerate(self._plan.slots(stretch))
            self._todo.extend((SlotKey(self._key, stretch, number), slot) for number, slot in slots)
        return bool(self._todo) and self._plan.tokens_for(self._todo[0][0].stretch) <= self._num_ready

    def is_news(self, num_missing: int) -> bool:
        """Whether fewer tokens are missing than we knew."""
        return self._plan.num_tokens - num_missing > self._num_ready

    def computed(self, num_missing: int) -> Iterator[Command]:
        """Only `num_missing` tokens are still missing: go on with the others. Raises what planning slots raises."""
        self._num_ready = self._plan.num_tokens - num_missing
        yield from self.go_on()

    def acquired(self, key: SlotKey, address: int, now: float) -> Iterator[Command]:
        """A slot is there: have it filled."""
        use = self._open[key]
        use.machine.move("acquired")
        use.address, use.last_sent = address, now
        self.num_bytes += use.slot.num_bytes
        self.num_rows += len(use.slot.wire)
        if self._strategy.source_gathers:
            yield self._pack(use)
        else:
            yield Post(key, use.slot.wire.shifted(0, address), Direction.READ)

    def _pack(self, use: SlotUse) -> Send:
        key, ours = use.key, self._ours
        message = Pack(ours, self._key.claim_id, self._lease_id, key.stretch, key.number, use.address)
        return Send(self._key.peer, message)

    def filled(self, key: SlotKey) -> Iterator[Command]:
        """Its bytes are there. A repeated or late message changes nothing."""
        use = self._open.get(key)
        if use is None:
            return
        if use.machine.allows("filled"):
            use.machine.move("filled")
            yield Stage(key, use.scatter)
        elif not use.was_emptying:
            # This ends only a slot that was being filled; one that is being scattered stays in use.
            yield from self.ended(key)

    def emptied(self, key: SlotKey) -> Iterator[Command]:
        """Its bytes are in their blocks; on to the next slot."""
        self._open.pop(key).machine.move("emptied")
        yield Release(key)
        yield from self.go_on()

    def repeat(self, now: float, resend_s: float) -> Iterator[Command]:
        """Ask the source again for what it has not written yet."""
        for use in self._open.values():
            if self._may_be_written(use) and use.state is SlotState.FILLING and now - use.last_sent >= resend_s:
                use.last_sent = now
                yield self._pack(use)

    # --- after a failure ---

    @property
    def is_scattering(self) -> bool:
        """Whether a slot is still being scattered into the blocks."""
        return any(use.was_emptying for use in self._open.values())

    def fail(self) -> Iterator[Command]:
        """Wait for what is in flight, and ask for nothing more."""
        for key, use in list(self._open.items()):
            if use.state is SlotState.FILLING and not self._strategy.source_gathers:
                yield Cancel(key)
            if use.fail():
                del self._open[key]
                yield Release(key)

    def ended(self, key: SlotKey) -> Iterator[Command]:
        """What was in flight has ended."""
        use = self._open.get(key)
        if use is not None and use.machine.allows("ended"):
            use.machine.move("ended")
            del self._open[key]
            yield Release(key)

    def fenced(self) -> Iterator[Command]:
        """The source writes no more."""
        for key in [key for key, use in self._open.items() if self._may_be_written(use)]:
            yield from self.ended(key)
