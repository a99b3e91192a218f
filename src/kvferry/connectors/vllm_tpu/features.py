"""What tpu-inference can do and its connector cannot, said before the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.errors import ConfigurationError


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigurationError for an engine whose caches cannot be moved."""
    for found, why in _unsupported(vllm_config):
        raise ConfigurationError(
            f"this engine's caches cannot be moved: {why}",
            found=found,
            expected="one process with tensor parallelism, whose arrays are new after each step",
            hint="docs/vllm-tpu.md says what is supported",
        )
    device = vllm_config.kv_transfer_config.kv_buffer_device
    if device != "cpu":
        raise ConfigurationError(
            "nothing can register a TPU's memory: caches go through the host's",
            found=f'"kv_buffer_device": "{device}"',
            expected='"kv_buffer_device": "cpu"',
        )


def _unsupported(vllm_config: Any) -> Iterator[tuple[str, str]]:
    parallel, strategy = vllm_config.parallel_config, vllm_config.sharding_config
    if parallel.pipeline_parallel_size > 1:
        yield f"--pipeline-parallel-size {parallel.pipeline_parallel_size}", "its stages are processes of their own"
    if strategy.total_dp_size > 1:
        yield f"data parallelism of {strategy.total_dp_size}", "its arrays are divided by blocks"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism", "its blocks are divided by tokens"
    if vllm_config.speculative_config is not None:
        yield "--speculative-config", "a speculator's arrays change outside of the steps"
    if vllm_config.additional_config.get("enable_continue_decode"):
        yield "enable_continue_decode", "the runner takes its new arrays only after it has called the connector"
    if (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("layer_wise"):
        yield "layer_wise", "a step is one program, which says nothing of its layers"
