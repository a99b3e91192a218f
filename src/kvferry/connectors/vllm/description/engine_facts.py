"""What a layout needs to know of an engine and its layers, read from its configuration; and names of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.parallel_state import get_dcp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from kvferry.errors import LayoutError

DRAFT_PREFIX = "draft."
_DRAFTS = ("mtp", "draft", "eagle", "medusa", "nextn")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "mamba_num_groups", "n_groups")


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the layer itself knows and its cache specification does not.

    `backend` is vLLM's name of its attention backend, `isa` the instruction set that the CPU backend packs for.
    `window_tokens` and `chunk_tokens` are how far a token sees, 0 without a limit: with vLLM's hybrid manager off,
    layers with and without a window share one specification. `is_draft` marks layers of a speculator.
    """

    backend: str = ""
    isa: str = ""
    window_tokens: int = 0
    chunk_tokens: int = 0
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What all layers of a rank have in common.

    `tensor_parallel` ranks divide heads and channels, this one is number `tensor_rank`. `context_parallel` ranks share
    out the tokens (vLLM's decode context parallelism) in runs of `run_tokens`, this one is number `context_rank`.
    `num_layers` counts the model's layers without a speculator's; `num_heads` are key and value heads over all ranks;
    `num_state_groups` is how many groups of B and C a Mamba 2 model has, 0 when unknown. `cache_dtype` is vLLM's word
    for the cache (`auto`, `fp8_e4m3` ...), `model_dtype` torch's for the model (`bfloat16`). `dynamic_scales` says
    that every engine scales its 8-bit cache on its own. `conv_dim_first` says that convolution states are stored
    channel by channel (vLLM's DS), not input by input (SD). `long_factors` says that longrope turns keys by its long
    factors. `layers` has every layer with a cache, by its vLLM name.
    """

    tensor_parallel: int = 1
    tensor_rank: int = 0
    context_parallel: int = 1
    context_rank: int = 0
    run_tokens: int = 1
    num_layers: int = 0
    num_heads: int = 0
    num_state_groups: int = 0
    cache_dtype: str = "auto"
    model_dtype: str = "bfloat16"
    dynamic_scales: bool = False
    conv_dim_first: bool = False
    long_factors: bool = False
    layers: Mapping[str, LayerFacts] | None = None

    def layer(self, name: str) -> LayerFacts:
        """The facts of a layer; a plain one's when vLLM has no object for it."""
        return (self.layers or {}).get(name, LayerFacts())


def engine_facts(vllm_config: Any) -> EngineFacts:
    """The facts of this worker process, read when its layers exist (in `register_kv_caches`)."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    text = model.hf_text_config
    layers = vllm_config.compilation_config.static_forward_context
    return EngineFacts(
        tensor_parallel=parallel.tensor_parallel_size,
        tensor_rank=get_tensor_model_parallel_rank(),
        context_parallel=parallel.decode_context_parallel_size,
        context_rank=get_dcp_group().rank_in_group if parallel.decode_context_parallel_size > 1 else 0,
        run_tokens=parallel.cp_kv_cache_interleave_size,
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        num_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        num_state_groups=next((int(n) for name in _GROUPS if (n := getattr(text, name, None))), 0),
        cache_dtype=str(cache.cache_dtype),
        model_dtype=str(model.dtype).removeprefix("torch."),
        dynamic_scales=bool(getattr(cache, "calculate_kv_scales", False)),
        conv_dim_first=is_conv_state_dim_first(),
        long_factors=has_long_factors(),
        layers={name: _layer(layer) for name, layer in layers.items() if hasattr(layer, "get_attn_backend")},
    )


def has_long_factors() -> bool:
    """Whether longrope turns the keys of this process by its long factors: a server decides once and for all, by
    whether its `--max-model-len` exceeds the model's original context."""
    return any(getattr(rope, "use_long_rope", False) for rope in _ROPE_DICT.values())


def _layer(layer: Any) -> LayerFacts:
    """Mamba layers have none of these; layers that vLLM patches in may lack some."""
    return LayerFacts(
        backend=str(layer.get_attn_backend().get_name()),
        isa=str(getattr(layer, "isa", "") or ""),
        window_tokens=int(getattr(layer, "sliding_window", 0) or 0),
        chunk_tokens=int(getattr(layer, "attention_chunk_size", 0) or 0),
        is_draft=bool(getattr(layer, "is_draft_layer", False)),
    )


def prefix_of(layer: str, engine: EngineFacts) -> str:
    """`model.layers.3` for `language_model.model.layers.3.self_attn.attn`; `draft.layers.0` for a speculator's first.
    Keys that are turned by other factors are another state, of which engines with the usual ones have none.

    Raises LayoutError when the name has no number.
    """
    parts = layer.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdecimal()]
    if not numbered:
        raise LayoutError(
            "the name of a layer contains no number", found=layer, expected="as in model.layers.3.self_attn.attn"
        )
    first, number = parts[: numbered[0]], int(parts[numbered[0]])
    # A layer of several attention modules numbers those too.
    rest = "".join(f".{parts[at]}" for at in numbered[1:]) + (".long" if engine.long_factors else "")
    beyond = 0 < engine.num_layers <= number
    if beyond and "layers" not in first:
        # Falcon-H1 numbers the state-space halves of its layers from the last attention layer on: `model.6.mixer`.
        return f"model.layers.{number - engine.num_layers}{rest}"
    if beyond or engine.layer(layer).is_draft or any(part.startswith(_DRAFTS) for part in first):
        return f"{DRAFT_PREFIX}layers.{number - engine.num_layers if beyond else number}{rest}"
    return f"model.layers.{number}{rest}"
