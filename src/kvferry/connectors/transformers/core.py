"""A loaded model, its cache, and the thread that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.utils import logging

from kvferry import Cache, Memory, SharedMemory
from kvferry.connectors.jobs import Event, GroupSize, Job, Settings, Stopped
from kvferry.connectors.sampling import GREEDY, Sampling, SamplingFields
from kvferry.connectors.step_cost import NO_COST
from kvferry.connectors.transformers.context import Context, context_of
from kvferry.connectors.transformers.features import ATTENTION, ATTENTION_OPTIONS, layers_without_cache
from kvferry.connectors.transformers.pool import (
    STATES_PER_LAYER,
    forget_layers,
    layout_of,
    owning_layers,
    ring_tokens,
    share_pool,
)
from kvferry.connectors.transformers.sampler import BatchSampler
from kvferry.connectors.transformers.scheduler import Command, EventRouter, FerryScheduler, LoopState
from kvferry.connectors.transformers.simulated_step_time import SimulatedStepTime
from kvferry.devices import CacheDevice, cache_device
from kvferry.errors import ConfigurationError
from kvferry.layout import Layout
from kvferry.options import staging_memory_named

LAYERS = ("layers", "h")  # GPT-2 and those of its time have the second name
MIN_BLOCK_TOKENS = 4  # transformers refuses smaller pages
STOP_WITHIN_S = 30.0


class Core:
    """A loaded model, its cache, and the thread that runs it. In the host, the cache lies in memory that other
    processes can map.

    `emit` is called in the engine's thread for everything that happens. `default_sampling` is how the model's authors
    want its tokens chosen. Raises ConfigurationError when the model cannot be loaded or the cache cannot be made.
    """

    def __init__(self, settings: Settings, emit: Callable[[Event], None]) -> None:
        _check(settings)
        self._on = _device(settings)
        torch.set_num_threads(settings.num_threads)
        self._model, self.tokenizer = _load(settings, self._on.device)
        self.default_sampling = _default_sampling(self._model.generation_config)
        self._loop_state = LoopState(emit, step_time=SimulatedStepTime(settings.step_cost))
        self._manager = _manager(self._model, settings, self._loop_state)
        processor = self._manager.batch_processor
        processor.model_runner._sample = BatchSampler(processor.model_runner, emit)
        if settings.step_cost != NO_COST:
            processor._generation_step = partial(self._loop_state.step_time.step, processor._generation_step)
        self._cache = processor.cache
        self._memory = Memory(self._cache.cache_tensor.data_ptr(), self._cache.cache_tensor.numel(), -1)
        self._shared: SharedMemory | None = None
        if self._on.device.type == "cpu":
            self._shared = share_pool(self._cache)
            self._memory = self._shared.memory
        forget_layers(self._cache, layers_without_cache(self._model))
        if settings.layer_wise:
            self._tell_layers()

    def start(self) -> None:
        """Start the engine's thread; may be done once."""
        run = self._manager._run_generation_loop
        self._manager._run_generation_loop = partial(self._run, run)
        self._manager.start()

    def stop(self) -> None:
        """End the thread, wait for it and let go of the shared memory. Blocks; safe to call twice."""
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=STOP_WITHIN_S, hard_stop=True)
        if self._shared is not None:
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
    def context(self) -> Context:
        """The longest sequence that the model computes as it does alone."""
        return context_of(self._model.config.get_text_config())

    @property
    def vocab_size(self) -> int:
        """Token ids are below this: the model can read them, and has a logit for each. A larger one would end the
        engine's thread."""
        ends = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        return min(int(end.weight.shape[0]) for end in ends if end is not None)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """What the model ends its answers with: what generation_config.json says, and as in vLLM the tokenizer's own
        end, which a chat model may have learnt where the file still has its base model's."""
        ids, own = self._model.generation_config.eos_token_id, self.tokenizer.eos_token_id
        said = [ids] if ids is None or isinstance(ids, int) else ids
        return frozenset(one for one in (*said, own) if one is not None and one < self.vocab_size)

    def group_sizes(self) -> tuple[GroupSize, ...]:
        """The cache groups, in the order of the block tables."""
        return tuple(
            GroupSize(allocator.tokens_per_page, allocator.blocks_per_sector, ring_tokens(allocator))
            for allocator in self._allocators()
        )

    def num_allocated_blocks(self) -> tuple[int, ...]:
        """Blocks in block tables, per cache group; a snapshot that may be a step old."""
        return tuple(sum(map(len, list(a.block_table.values()))) for a in self._allocators())

    def num_held_sectors(self) -> tuple[int, ...]:
        """Sectors of the pool with a block in a block table, per cache group. From any thread: a table that is dropped
        meanwhile is counted, one that is new meanwhile may not be."""
        return tuple(
            len({block // a.blocks_per_sector for table in list(a.block_table.values()) for block in list(table)})
            for a in self._allocators()
        )

    def memory(self) -> Memory:
        """The cache's memory. It stays mapped as long as this object lives."""
        return self._memory

    def layout(self) -> Layout:
        """Where every element of the cache lies. Raises LayoutError when upstream's views contradict themselves."""
        return layout_of(self._allocators(), self._memory, self._on.device)

    def cache(self) -> Cache:
        """How an agent gets at the cache. Between two steps, and when it says that one has ended, upstream has waited
        for the device (`ContinuousBatchingIOs.retrieve_device_outputs`): nothing here has to."""
        return self._on.cache((self.layout(),), (self._memory,))

    def _tell_layers(self) -> None:
        """Hear of every layer that has ended, and so has its part of the cache."""
        owners = owning_layers(self._allocators())
        for number, layer in enumerate(_layers(self._model)):
            num_states = STATES_PER_LAYER * sum(owner <= number for owner in owners)
            layer.register_forward_hook(partial(self._layer_ended, num_states))

    def _layer_ended(self, num_states: int, *_: Any) -> None:
        self._manager.batch_processor.scheduler.tell_states(num_states)

    def _allocators(self) -> list[Any]:
        return list(self._cache.cache_allocators.values())

    def _command(self, command: Command) -> None:
        self._loop_state.commands.put(command)
        self._manager._wake_up_loop.set()

    def _run(self, run: Callable[..., None], **options: Any) -> None:
        """The engine's thread. Upstream catches every error in it, keeps it and returns; `options` are its own."""
        run(**options)
        error = self._manager.background_thread_status.fatal_error
        self._loop_state.emit(Stopped("" if error is None else f"{type(error).__name__}: {error}"))


def _layers(model: Any) -> Any:
    """The decoder's layers, in the order in which they compute. Raises ConfigurationError."""
    decoder = model.get_decoder()
    for name in LAYERS:
        if isinstance(layers := getattr(decoder, name, None), torch.nn.ModuleList):
            return layers
    raise ConfigurationError(
        "this model's layers cannot be sent one by one: they are not where other models have them",
        found=f"layer-wise, and a decoder of the class {type(decoder).__name__}",
        expected=f"a decoder with its layers in {' or '.join(LAYERS)}",
        hint="without --layer-wise, what a step has computed is sent when the step ends",
    )


def _check(settings: Settings) -> None:
    if settings.block_tokens < MIN_BLOCK_TOKENS:
        raise ConfigurationError(
            "blocks are too small", found=f"{settings.block_tokens} tokens", expected=f">= {MIN_BLOCK_TOKENS}"
        )
    if min(settings.num_blocks, settings.max_batch_tokens, settings.num_threads) < 1:
        raise ConfigurationError("num_blocks, max_batch_tokens and num_threads must be positive", found=str(settings))
    if settings.layer_wise and settings.device != "cpu":
        raise ConfigurationError(
            "layers cannot be sent one by one from this device",
            found=f"layer-wise, and device {settings.device!r}",
            expected="device 'cpu'",
            hint="without --layer-wise, what a step has computed is sent when the step ends",
        )
    dtype = getattr(torch, settings.dtype, None)
    if settings.dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError("unknown dtype", found=settings.dtype, expected="auto, float32, bfloat16 or float16")


def _device(settings: Settings) -> CacheDevice:
    """Raises ConfigurationError for a device that torch does not know, does not have, or nothing here serves."""
    try:
        device = torch.device(settings.device)
        num_here = 1 if device.type in ("cpu", "meta") else torch.get_device_module(device).device_count()
    except RuntimeError as error:
        raise ConfigurationError(
            "unknown device",
            found=settings.device,
            expected="cpu, or cuda or xpu, with or without a number",
            hint=_first_sentence(str(error)),
        ) from None
    if (device.index or 0) >= num_here:
        raise ConfigurationError(
            "this device is not here",
            found=f"{settings.device}, and {num_here} {device.type.upper()} devices",
            expected="a device that torch has",
            hint="a build of torch for it and its driver; `kvferry doctor` lists devices",
        )
    buffer_device = device.type if settings.buffer_device == "auto" else settings.buffer_device
    return cache_device(device, buffer_device, staging_memory_named(settings.staging_memory))


def _load(settings: Settings, device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer. Upstream's complaints are long and end in advice of its own: one line is kept."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=settings.dtype, attn_implementation=ATTENTION
        )
        model = model.to(device)
        return model.eval(), AutoTokenizer.from_pretrained(settings.model)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model {settings.model!r} does not fit on the device",
            found=_first_sentence(str(error)),
            hint="a device with more free memory, or a smaller model",
        ) from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(
            f"cannot load the model {settings.model!r}",
            found=_first_sentence(str(error)),
            expected="a folder with a causal language model and its tokenizer, or a name on the Hugging Face Hub",
            hint="check the path or the name; omit --model to use the built-in tiny model",
        ) from None


def _default_sampling(config: GenerationConfig) -> Sampling:
    """How the model's authors want its tokens chosen (generation_config.json); as vLLM does where they say nothing, at
    temperature 1. Unlike vLLM, a model that says `do_sample: false` is decoded greedily.

    Raises ConfigurationError for what no request could say.
    """
    try:
        given = msgspec.to_builtins(msgspec.convert(config.to_dict(), SamplingFields, strict=False))
    except msgspec.ValidationError as error:
        what = "the model's generation_config.json has a value that cannot be used"
        raise ConfigurationError(what, found=str(error), hint="correct it; each request may say its own") from None
    if config.do_sample is False:
        return replace(GREEDY, **given | {"temperature": 0.0})
    return replace(Sampling(temperature=1.0), **given)


def _first_sentence(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[:1] and lines[0].endswith(":") else 1])


def _manager(model: Any, settings: Settings, loop_state: LoopState) -> Any:
    """A manager whose processor exists before its thread, so that the cache can be moved; `start` keeps it."""
    config = ContinuousBatchingConfig(
        page_size=settings.block_tokens,
        num_blocks=settings.num_blocks,
        max_batch_tokens=settings.max_batch_tokens,
        allow_block_sharing=False,  # a shared block would have two owners
        use_async_batching=False,
        use_cuda_graph=False,
        safety_margin=0.0,  # admission keeps the margin: none is needed
        scheduler_type="kvferry",
        **ATTENTION_OPTIONS,
    )
    eos = model.generation_config.eos_token_id
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos)
    try:
        manager = model.init_continuous_batching(greedy, continuous_batching_config=config)
        manager.output_router = EventRouter(loop_state)
        SCHEDULER_MAPPING["kvferry"] = partial(FerryScheduler, loop_state)
        manager.batch_processor = manager._create_batch_processor()
    except (RuntimeError, AttributeError, ValueError, MemoryError) as error:
        # Upstream asks each configuration for one size of heads: those that have several (Gemma 4) or none raise the
        # first two. A full device is a RuntimeError as well.
        raise ConfigurationError(
            f"the engine cannot make a cache for {settings.model!r}",
            found=_first_sentence(str(error)),
            expected="a model with full or sliding-window attention and room for the cache",
            hint="a smaller cache (--num-blocks; kvferry up: --cache-tokens) or --max-batch-tokens, or another model",
        ) from None
    return manager
