"""Every internal name of transformers that the connector leans on: an upgrade must fail here, and by name."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, model_runner, requests, scheduler
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from kvferry.connectors.transformers import features
from kvferry.embedded.engine.async_engine import Engine
from kvferry.errors import ConfigurationError

MANAGER = continuous_api.ContinuousBatchingManager
SIGNATURES = {
    PagedAttentionCache.can_store_request_tokens: ["self", "state", "request_len", "dry_run"],
    CachePool.try_to_free_sectors: ["self"],
    FullAttentionCacheAllocator.register_cache_tensor: [
        "self",
        "bytes_per_sector",
        "non_trash_bytes",
        "cache_tensor",
        "pool",
    ],
    MANAGER._create_batch_processor: ["self"],
    MANAGER.start: ["self"],
    continuous_api.ContinuousBatchProcessor._generation_step: ["self", "model"],
    MANAGER.stop: ["self", "block", "timeout", "keep_for_next_session", "hard_stop"],
    scheduler.FIFOScheduler.clear_cancelled_requests: ["self"],
    scheduler.FIFOScheduler.set_request_cancellation: ["self", "request_id"],
    scheduler.FIFOScheduler.add_waiting_request: ["self", "state"],
    scheduler.FIFOScheduler.finish_request: ["self", "request_id"],
    scheduler.FIFOScheduler.schedule_batch: ["self", "token_budget", "cache_budget"],
    model_runner.ModelRunner._sample: ["self", "scores", "output_ids"],
    continuous_api.OutputRouter.deliver: ["self", "output"],
    continuous_api.OutputRouter.deliver_batch: ["self", "outputs"],
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_functions_are_called_as_before(function: object) -> None:
    assert list(inspect.signature(function).parameters) == SIGNATURES[function]


def test_the_loop_takes_nothing_but_how_it_computes() -> None:
    taken = list(inspect.signature(MANAGER._run_generation_loop).parameters)
    assert taken in (["self"], ["self", "use_inference_mode"])  # since 5.24


def test_layers_write_into_the_cache_in_one_of_two_ways() -> None:
    """`test_embedded_shared_layers.py` has what hangs on it, and on the name `is_kv_shared_layer`."""
    taken = list(inspect.signature(PagedAttentionCache.update).parameters)[1:]
    assert taken in (
        ["key_states", "value_states", "layer_idx", "kwargs"],
        ["key_states", "value_states", "layer_idx", "read_index", "write_index"],  # before 5.19
    )


def test_attributes_are_still_there(source: Engine) -> None:
    manager, cache = source._core._manager, source._core._cache
    assert len(source._core._model.get_decoder().layers) == source._core._model.config.num_hidden_layers
    for owner, names in (
        (manager, ["_wake_up_loop", "background_thread_status", "batch_processor", "output_router"]),
        (manager.background_thread_status, ["fatal_error"]),
        (manager.batch_processor.model_runner, ["inputs_and_outputs"]),
        (manager.batch_processor.inputs_and_outputs, ["requests_in_batch"]),
        (manager.batch_processor.scheduler, ["active_requests", "_requests_to_cancel"]),
        (cache, ["bytes_per_sector", "cache_allocators", "cache_tensor", "num_sectors", "pool"]),
    ):
        assert [name for name in names if not hasattr(owner, name)] == []
    names = [
        *("_kv_token_views", "block_physical_stride", "block_table", "blocks_per_sector", "bytes_per_block"),
        *("cache_dtype", "head_dim", "index", "num_key_value_heads", "tokens_per_page"),
    ]
    for allocator in cache.cache_allocators.values():
        assert [name for name in names if not hasattr(allocator, name)] == []
    assert "sliding_window" in inspect.getsource(SlidingAttentionCacheAllocator.__init__)


def test_records_have_the_same_fields() -> None:
    state = requests.RequestState("name", [1, 2], streaming=True, max_new_tokens=3, eos_token_id=[])
    assert (state.position_offset, state.remaining_prefill_tokens, state.generated_tokens) == (0, [1, 2], [])
    output = state.to_generation_output()
    assert (output.request_id, output.generated_tokens, output.error, output.is_finished()) == ("name", [], None, False)
    future = requests.FutureRequestState(state, True, {}, 2)
    assert (future.query_length, future.has_new_token, future.state) == (2, True, state)
    assert "fifo" in scheduler.SCHEDULER_MAPPING
    config = ContinuousBatchingConfig(page_size=16, num_blocks=4, max_batch_tokens=8, scheduler_type="fifo")
    assert config.allow_block_sharing
    assert getattr(config, "auto_switch_to_flash", True)  # since 5.19


@pytest.mark.parametrize(
    ("version", "is_refused"), [("5.17.0", True), ("5.18.0", False), ("5.24.3", False), ("5.25.0.dev0", True)]
)
def test_a_version_that_nobody_has_tried_is_refused(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features.transformers, "__version__", version)
    if is_refused:
        with pytest.raises(ConfigurationError, match=f"found: {version}.*5.18 to 5.24"):
            features.check_version()
    else:
        features.check_version()


def test_a_chat_template_is_rendered_as_upstream_does(source: Engine) -> None:
    tokenizer, messages = source.tokenizer, [{"role": "user", "content": "a"}]
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert features.render(tokenizer, messages, {"add_generation_prompt": True}) == theirs


def test_the_range_is_that_of_the_extra() -> None:
    extra = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (oldest, after), newest = features.OLDEST, features.NEWEST
    assert f"transformers>={oldest}.{after},<{newest[0]}.{newest[1] + 1}" in extra["engine"]


def test_the_cache_lies_in_the_shared_memory(source: Engine) -> None:
    memory, cache = source.memory(), source._core._cache
    assert cache.cache_tensor.data_ptr() == memory.address
    assert cache.cache_tensor.numel() == memory.size_bytes
    for allocator in cache.cache_allocators.values():
        for views in allocator._kv_token_views.values():
            for view in views:
                assert memory.address <= view.data_ptr() < memory.address + memory.size_bytes
