"""What runs in the engine's thread: commands between two steps, and a word about everything that happens there.

The engine's thread belongs to its loop; blocks may change hands only between two steps. The loop calls
`Scheduler.clear_cancelled_requests` before every step, so this is where commands run, in the order they came.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from kvferry import Ahead
from kvferry.connectors.jobs import Allocated, BlockTables, Event, Freed, Held, Job, Produced, Progressed
from kvferry.connectors.step_cost import NO_COST
from kvferry.connectors.transformers.pool import ring_tokens
from kvferry.connectors.transformers.sampler import SampledState, TokenSampler
from kvferry.connectors.transformers.simulated_step_time import SimulatedStepTime

Command = Callable[["FerryScheduler"], None]


@dataclass(frozen=True, slots=True)
class LoopState:
    """What the parts that live in the engine's thread share; only `commands` is used from other threads.

    `num_told` has the requests whose progress is told, with how far they were when that was done last; `in_step` those
    of them that the running step computes, with how far they will be. `step_time` is told of every batch.
    """

    emit: Callable[[Event], None]
    commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    hold_ids: set[str] = field(default_factory=set)
    num_computed: dict[str, int] = field(default_factory=dict)
    num_told: dict[str, int] = field(default_factory=dict)
    in_step: dict[str, int] = field(default_factory=dict)
    step_time: SimulatedStepTime = field(default_factory=lambda: SimulatedStepTime(NO_COST))


class FerryScheduler(FIFOScheduler):  # type: ignore[misc]
    """FIFO scheduling that obeys commands between steps, holds blocks and counts what is really computed."""

    def __init__(self, loop_state: LoopState, **arguments: Any) -> None:
        self._loop_state = loop_state
        super().__init__(**arguments)

    def clear_cancelled_requests(self) -> list[Any]:
        """Run the commands, free what they cancelled, and say how far the others are."""
        for _ in range(self._loop_state.commands.qsize()):
            self._loop_state.commands.get_nowait()(self)
        freed_ids = sorted(self._requests_to_cancel)
        states: list[Any] = super().clear_cancelled_requests()
        for request_id in freed_ids:
            self._loop_state.hold_ids.discard(request_id)
            self._loop_state.num_computed.pop(request_id, None)
            self._loop_state.num_told.pop(request_id, None)
            self._loop_state.emit(Freed(request_id))
        self._tell_progress()
        return states

    def _tell_progress(self) -> None:
        """Tell how far requests are. Upstream moves `position_offset` on early: it is true only between steps."""
        for request_id, num_told in self._loop_state.num_told.items():
            state = self.active_requests.get(request_id)
            if state is not None and state.position_offset > num_told:
                self._loop_state.num_told[request_id] = state.position_offset
                self._loop_state.emit(Progressed(request_id, self.tables(request_id), state.position_offset))

    def tell_states(self, num_states: int) -> None:
        """Tell, in the middle of a step, that the first `num_states` states of what the step computes are there."""
        for request_id, num_tokens in self._loop_state.in_step.items():
            num_told = self._loop_state.num_told[request_id]
            ahead = Ahead(num_tokens, num_states)
            self._loop_state.emit(Progressed(request_id, self.tables(request_id), num_told, ahead))

    def finish_request(self, request_id: str) -> None:
        """Upstream frees the blocks here; those of a held request stay in its block tables instead."""
        if request_id not in self._loop_state.hold_ids:
            super().finish_request(request_id)
            return
        self.active_requests.pop(request_id, None)
        self._loop_state.num_told.pop(request_id, None)
        self._loop_state.emit(Held(request_id, self.tables(request_id)))

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Count, per request, the tokens that go through the model before its first answer."""
        batch = super().schedule_batch(token_budget, cache_budget)
        if batch[0]:
            self._loop_state.step_time.scheduled(batch[0])
        self._loop_state.in_step.clear()
        for scheduled in batch[0] or ():
            if scheduled.state.request_id in self._loop_state.num_told:
                num_tokens = scheduled.state.position_offset + scheduled.query_length
                self._loop_state.in_step[scheduled.state.request_id] = num_tokens
            if not scheduled.state.generated_tokens:
                request_id = scheduled.state.request_id
                before = self._loop_state.num_computed.get(request_id, 0)
                self._loop_state.num_computed[request_id] = before + scheduled.query_length
        return batch

    def tables(self, request_id: str) -> BlockTables:
        """The block tables of a request, one per cache group."""
        allocators = self.cache.cache_allocators.values()
        return tuple(tuple(allocator.block_table.get(request_id, ())) for allocator in allocators)

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request that does not run the blocks for its first `num_tokens` tokens."""
        stored = self._store(request_id, num_tokens)
        self._loop_state.emit(Allocated(request_id, self.tables(request_id) if stored else ()))

    def admit(self, job: Job) -> None:
        """Queue a request; the tokens whose cache is there are skipped, as when upstream restores a request."""
        state = SampledState(
            job.request_id,
            list(job.prompt),
            streaming=True,
            max_new_tokens=job.max_new_tokens,
            eos_token_id=sorted(job.stop_token_ids),
            sampler=TokenSampler.of(job),
        )
        state.position_offset = job.num_cached
        state.remaining_prefill_tokens = list(job.prompt[job.num_cached :])
        if job.hold:
            self._loop_state.hold_ids.add(job.request_id)
            self._store(job.request_id, len(job.prompt))
        if job.tells_progress and self._keeps(len(job.prompt)):
            self._loop_state.num_told[job.request_id] = 0
        self.add_waiting_request(state)

    def _keeps(self, num_tokens: int) -> bool:
        """Whether what is computed of a prompt stays where it is until all of it is.

        A ring that is smaller than the prompt is written over by the steps that follow: of such a model nothing can be
        promised before the last one. Other blocks change hands only when a request is ended, since admission leaves
        upstream no reason to move one out of the cache.
        """
        rings = [ring_tokens(allocator) for allocator in self.cache.cache_allocators.values()]
        return all(not ring or num_tokens <= ring for ring in rings)

    def _store(self, request_id: str, num_tokens: int) -> bool:
        """Allocate blocks in ascending order: neighbours travel as one piece. Return whether there are enough."""
        self.cache.pool.try_to_free_sectors()
        if not self.cache.can_store_request_tokens(RequestState(request_id, []), num_tokens):
            return False
        for allocator in self.cache.cache_allocators.values():
            allocator.block_table[request_id].sort()
        return True


class EventRouter(OutputRouter):  # type: ignore[misc]
    """Hands every output to `emit` instead of to queues, in the order the engine made them."""

    def __init__(self, loop_state: LoopState) -> None:
        super().__init__()
        self._loop_state = loop_state

    def deliver(self, output: Any) -> None:
        """Hand on one output of one request: all its tokens so far."""
        counts, finished = self._loop_state.num_computed, output.is_finished()
        num_computed = (counts.pop if finished else counts.get)(output.request_id, 0)
        tokens = tuple(output.generated_tokens)
        self._loop_state.emit(Produced(output.request_id, tokens, num_computed, finished, output.error or ""))

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Hand on the outputs of one step."""
        for output in outputs:
            self.deliver(output)
