"""Hugging Face transformers' continuous batching as an engine whose cache can be read and filled from outside.

Adapter only: it describes the cache, carries commands to the engine's thread and reports what happened there. Who
may use how much of the cache is decided above it (`kvferry.embedded.engine`). This file alone touches internals of
transformers; they were read in 5.19, and `tests/embedded/test_touched_names.py` names every one of them.

The engine's thread belongs to its loop; blocks may change hands only between two steps. The loop calls
`Scheduler.clear_cancelled_requests` before every step, so this is where commands run, in the order they came.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.utils import logging

from kvferry.connectors.jobs import (
    Allocated,
    BlockTables,
    Event,
    Freed,
    GroupSize,
    Held,
    Job,
    Produced,
    Progressed,
    Settings,
    Stopped,
)
from kvferry.connectors.step_cost import NO_COST, StepCost
from kvferry.errors import ConfigurationError, LayoutError, TransportError
from kvferry.plan.layout import Axis, CacheGroup, Layout, Placement, Region, State
from kvferry.plan.span import Span
from kvferry.transport.base import Memory
from kvferry.transport.shared_memory import SharedMemory, allocate_shared

__all__ = ["Core"]

MIN_BLOCK_TOKENS = 4  # transformers refuses smaller pages
STOP_WITHIN_S = 30.0
# An engine that had nothing to do does not catch up on it.
MAX_CATCH_UP_S = 0.02

Command = Callable[["FerryScheduler"], None]


@dataclass(frozen=True, slots=True)
class Desk:
    """What the parts that live in the engine's thread share; only `commands` is used from other threads.

    `num_told` has the requests whose progress is told, with how far they were when that was done last. `pace` is told
    of every batch.
    """

    emit: Callable[[Event], None]
    commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    hold_ids: set[str] = field(default_factory=set)
    num_computed: dict[str, int] = field(default_factory=dict)
    num_told: dict[str, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace(NO_COST))


class Pace:
    """Makes steps last as long as those of another model. Lives in the engine's thread."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._due = 0.0

    def scheduled(self, batch: list[Any]) -> None:
        """What the next step will compute. It begins when the one before was due to end: what lies between is ours."""
        num_decoded = sum(bool(scheduled.state.generated_tokens) for scheduled in batch)
        num_tokens = sum(scheduled.query_length for scheduled in batch) - num_decoded
        step_s = self._cost.seconds(num_tokens, num_decoded)
        self._due = max(self._due, time.perf_counter() - MAX_CATCH_UP_S) + step_s

    def step(self, compute: Callable[[Any], None], model: Any) -> None:
        """The real step, and then what is missing."""
        compute(model)
        time.sleep(max(0.0, self._due - time.perf_counter()))


class FerryScheduler(FIFOScheduler):  # type: ignore[misc]
    """FIFO scheduling that obeys commands between steps, holds blocks and counts what is really computed."""

    def __init__(self, desk: Desk, **arguments: Any) -> None:
        self._desk = desk
        super().__init__(**arguments)

    def clear_cancelled_requests(self) -> list[Any]:
        """Run the commands, free what they cancelled, and say how far the others are."""
        for _ in range(self._desk.commands.qsize()):
            self._desk.commands.get_nowait()(self)
        freed_ids = sorted(self._requests_to_cancel)
        states: list[Any] = super().clear_cancelled_requests()
        for request_id in freed_ids:
            self._desk.hold_ids.discard(request_id)
            self._desk.num_computed.pop(request_id, None)
            self._desk.num_told.pop(request_id, None)
            self._desk.emit(Freed(request_id))
        self._tell_progress()
        return states

    def _tell_progress(self) -> None:
        """Upstream moves `position_offset` on when it prepares a step: only between steps is so much really there."""
        for request_id, num_told in self._desk.num_told.items():
            state = self.active_requests.get(request_id)
            if state is not None and state.position_offset > num_told:
                self._desk.num_told[request_id] = state.position_offset
                self._desk.emit(Progressed(request_id, self.tables(request_id), state.position_offset))

    def finish_request(self, request_id: str) -> None:
        """Upstream frees the blocks here; those of a held request stay in its block tables instead."""
        if request_id not in self._desk.hold_ids:
            super().finish_request(request_id)
            return
        self.active_requests.pop(request_id, None)
        self._desk.num_told.pop(request_id, None)
        self._desk.emit(Held(request_id, self.tables(request_id)))

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Count, per request, the tokens that go through the model before its first answer."""
        batch = super().schedule_batch(token_budget, cache_budget)
        if batch[0]:
            self._desk.pace.scheduled(batch[0])
        for scheduled in batch[0] or ():
            if not scheduled.state.generated_tokens:
                request_id = scheduled.state.request_id
                before = self._desk.num_computed.get(request_id, 0)
                self._desk.num_computed[request_id] = before + scheduled.query_length
        return batch

    def tables(self, request_id: str) -> BlockTables:
        """The block tables of a request, one per cache group."""
        allocators = self.cache.cache_allocators.values()
        return tuple(tuple(allocator.block_table.get(request_id, ())) for allocator in allocators)

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request that does not run the blocks for its first `num_tokens` tokens."""
        stored = self._store(request_id, num_tokens)
        self._desk.emit(Allocated(request_id, self.tables(request_id) if stored else ()))

    def admit(self, job: Job) -> None:
        """Queue a request; the tokens whose cache is there are skipped, as when upstream restores a request."""
        state = RequestState(
            job.request_id,
            list(job.prompt),
            streaming=True,
            max_new_tokens=job.max_new_tokens,
            eos_token_id=sorted(job.stop_token_ids),
        )
        state.position_offset = job.num_cached
        state.remaining_prefill_tokens = list(job.prompt[job.num_cached :])
        if job.hold:
            self._desk.hold_ids.add(job.request_id)
            self._store(job.request_id, len(job.prompt))
        if job.tells_progress and self._keeps(len(job.prompt)):
            self._desk.num_told[job.request_id] = 0
        self.add_waiting_request(state)

    def _keeps(self, num_tokens: int) -> bool:
        """Whether what is computed of a prompt stays where it is until all of it is.

        A ring that is smaller than the prompt is written over by the steps that follow: of such a model nothing can be
        promised before the last one. Other blocks change hands only when a request is ended, since admission leaves
        upstream no reason to move one out of the cache.
        """
        rings = [_ring(allocator) for allocator in self.cache.cache_allocators.values()]
        return all(not ring or num_tokens <= ring for ring in rings)

    def _store(self, request_id: str, num_tokens: int) -> bool:
        """Blocks in ascending order: neighbours in the pool then travel as one piece."""
        self.cache.pool.try_to_free_sectors()
        if not self.cache.can_store_request_tokens(RequestState(request_id, []), num_tokens):
            return False
        for allocator in self.cache.cache_allocators.values():
            allocator.block_table[request_id].sort()
        return True


class DeskRouter(OutputRouter):  # type: ignore[misc]
    """Hands every output to the desk instead of to queues, in the order the engine made them."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    def deliver(self, output: Any) -> None:
        """One output of one request: all its tokens so far."""
        counts, finished = self._desk.num_computed, output.is_finished()
        num_computed = (counts.pop if finished else counts.get)(output.request_id, 0)
        tokens = tuple(output.generated_tokens)
        self._desk.emit(Produced(output.request_id, tokens, num_computed, finished, output.error or ""))

    def deliver_batch(self, outputs: list[Any]) -> None:
        """The outputs of one step."""
        for output in outputs:
            self.deliver(output)


class Core:
    """A loaded model, its cache in memory that other processes can map, and the thread that runs it.

    `emit` is called in the engine's thread for everything that happens. Raises ConfigurationError when the model
    cannot be loaded or the cache cannot be made.
    """

    def __init__(self, settings: Settings, emit: Callable[[Event], None]) -> None:
        _check(settings)
        torch.set_num_threads(settings.num_threads)
        self._model, self.tokenizer = _load(settings)
        self._desk = Desk(emit, pace=Pace(settings.step_cost))
        self._manager = _manager(self._model, settings, self._desk)
        processor = self._manager.batch_processor
        if settings.step_cost != NO_COST:
            processor._generation_step = partial(self._desk.pace.step, processor._generation_step)
        self._cache = processor.cache
        self._shared = _share(self._cache)

    def start(self) -> None:
        """Start the engine's thread; may be done once."""
        run = self._manager._run_generation_loop
        self._manager._run_generation_loop = partial(self._run, run)
        self._manager.start()

    def stop(self) -> None:
        """End the thread, wait for it and let go of the shared memory. Blocks; safe to call twice."""
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=STOP_WITHIN_S, hard_stop=True)
        self._shared.close()

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a new request blocks for `num_tokens` tokens; answered by `Allocated`."""
        self._command(lambda scheduler: scheduler.allocate(request_id, num_tokens))

    def admit(self, job: Job) -> None:
        """Run a request; answered by `Produced`, and by `Held` before the last one when it is to be held."""
        self._command(lambda scheduler: scheduler.admit(job))

    def free(self, request_id: str) -> None:
        """End a request, whatever it does, and free its blocks; answered by `Freed`."""
        self._command(lambda scheduler: scheduler.set_request_cancellation(request_id))

    @property
    def num_sectors(self) -> int:
        """The size of the pool that all cache groups share."""
        return int(self._cache.num_sectors)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model was made for."""
        config = self._model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a larger one would end the engine's thread."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """What the model ends its answers with."""
        ids = self._model.generation_config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset((ids,) if isinstance(ids, int) else ids)

    def group_sizes(self) -> tuple[GroupSize, ...]:
        """The cache groups, in the order of the block tables."""
        return tuple(
            GroupSize(allocator.tokens_per_page, allocator.blocks_per_sector, _ring(allocator))
            for allocator in self._allocators()
        )

    def num_allocated_blocks(self) -> tuple[int, ...]:
        """Blocks in block tables, per cache group; a snapshot that may be a step old."""
        return tuple(sum(map(len, list(a.block_table.values()))) for a in self._allocators())

    def memory(self) -> Memory:
        """The cache's memory. It stays mapped as long as this object lives."""
        return self._shared.memory

    def layout(self) -> Layout:
        """Where every element of the cache lies. Raises LayoutError when upstream's views contradict themselves."""
        allocators = self._allocators()
        memory = self._shared.memory
        return Layout(
            states=tuple(state for allocator in allocators for state in _states(allocator)),
            regions=(Region(memory.address, memory.size_bytes, "dram", 0),),
            groups=tuple(_group(allocator, memory.size_bytes) for allocator in allocators),
            placements=tuple(p for allocator in allocators for p in _placements(allocator, memory.address)),
        )

    def _allocators(self) -> list[Any]:
        return list(self._cache.cache_allocators.values())

    def _command(self, command: Command) -> None:
        self._desk.commands.put(command)
        self._manager._wake_up_loop.set()

    def _run(self, run: Callable[[], None]) -> None:
        """The engine's thread. Upstream catches every error in it, keeps it and returns."""
        run()
        error = self._manager.background_thread_status.fatal_error
        self._desk.emit(Stopped("" if error is None else f"{type(error).__name__}: {error}"))


def _check(settings: Settings) -> None:
    if settings.block_tokens < MIN_BLOCK_TOKENS:
        raise ConfigurationError(
            "blocks are too small", found=f"{settings.block_tokens} tokens", expected=f">= {MIN_BLOCK_TOKENS}"
        )
    if min(settings.num_blocks, settings.max_batch_tokens, settings.num_threads) < 1:
        raise ConfigurationError("num_blocks, max_batch_tokens and num_threads must be positive", found=str(settings))
    if settings.dtype != "auto" and not isinstance(getattr(torch, settings.dtype, None), torch.dtype):
        raise ConfigurationError("unknown dtype", found=settings.dtype, expected="auto, float32, bfloat16 or float16")


def _load(settings: Settings) -> tuple[Any, Any]:
    """The model and its tokenizer. Upstream's complaints are long and end in advice of its own: one line is kept."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype, attn_implementation="sdpa")
        return model.eval(), AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigurationError(
            f"cannot load the model {settings.model!r}",
            found=str(error).strip().partition("\n")[0],
            expected="a folder with a causal language model and its tokenizer, or a name on the hub",
            hint="check the path or the name; leave the model out to use the built-in tiny one",
        ) from None


def _manager(model: Any, settings: Settings, desk: Desk) -> Any:
    """A manager whose processor exists before its thread, so that the cache can be moved; `start` keeps it."""
    config = ContinuousBatchingConfig(
        page_size=settings.block_tokens,
        num_blocks=settings.num_blocks,
        max_batch_tokens=settings.max_batch_tokens,
        allow_block_sharing=False,  # a shared block would have two owners
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        safety_margin=0.0,  # admission keeps the margin: none is needed
        scheduler_type="kvferry",
    )
    eos = model.generation_config.eos_token_id
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos)
    try:
        manager = model.init_continuous_batching(greedy, continuous_batching_config=config)
        manager.output_router = DeskRouter(desk)
        SCHEDULER_MAPPING["kvferry"] = partial(FerryScheduler, desk)
        manager.batch_processor = manager._create_batch_processor()
    except (ValueError, MemoryError) as error:
        raise ConfigurationError(
            f"the engine cannot make a cache for {settings.model!r}",
            found=str(error),
            expected="a model with full or sliding-window attention and room for the cache",
            hint="lower num_blocks or max_batch_tokens, or serve another model",
        ) from None
    return manager


def _share(cache: Any) -> SharedMemory:
    """Move the pool into memory that other processes can map."""
    try:
        memory = allocate_shared(cache.cache_tensor.numel(), "kvferry-cache")
    except TransportError as error:
        raise ConfigurationError(error.what, found=error.found, hint="lower num_blocks") from error
    shared = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    kept_bytes = cache.num_sectors * cache.bytes_per_sector
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(cache.bytes_per_sector, kept_bytes, shared, cache.pool)
    cache.cache_tensor = shared
    return memory


def _ring(allocator: Any) -> int:
    return int(getattr(allocator, "sliding_window", 0))


def _group(allocator: Any, size_bytes: int) -> CacheGroup:
    """Block ids count from the pool's start, the sectors that are never given away included."""
    return CacheGroup(allocator.tokens_per_page, size_bytes // allocator.bytes_per_block, _ring(allocator))


def _states(allocator: Any) -> list[State]:
    axes = (Axis("head", allocator.num_key_value_heads), Axis("dim", allocator.head_dim))
    dtype = str(allocator.cache_dtype).removeprefix("torch.")
    item_bytes, window = allocator.cache_dtype.itemsize, _ring(allocator)
    return [State(name, dtype, item_bytes, axes, per_token=True, window_tokens=window) for name, _ in _views(allocator)]


def _views(allocator: Any) -> list[tuple[str, torch.Tensor]]:
    """Each state's view of the pool, shaped (row, head, dim); a token of a block is a row."""
    views = sorted(allocator._kv_token_views.items())
    return [(f"model.layers.{i}.{part}", view) for i, pair in views for part, view in zip("kv", pair, strict=True)]


def _placements(allocator: Any, base: int) -> list[Placement]:
    item_bytes = allocator.cache_dtype.itemsize
    spans = (Span(0, allocator.num_key_value_heads), Span(0, allocator.head_dim))
    placements = []
    for name, view in _views(allocator):
        row, head, dim = (stride * item_bytes for stride in view.stride())
        block = allocator.block_physical_stride * row
        if block != allocator.bytes_per_block or tuple(view.shape[1:]) != tuple(map(len, spans)):
            raise LayoutError(
                f"the engine's view of {name} does not fit its blocks",
                found=f"{block} bytes per block, {tuple(view.shape[1:])} per token",
                expected=f"{allocator.bytes_per_block} bytes per block, {tuple(map(len, spans))} per token",
                hint="this release of transformers arranges its cache in a new way",
            )
        offset = view.data_ptr() - base
        placements.append(Placement(name, 0, allocator.index, offset, spans, (head, dim), block, row))
    return placements
