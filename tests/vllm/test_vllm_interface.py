"""What the connector uses of vLLM, looked for in the source of a version that need not run here.

Always in the installed one, and in those that KVFERRY_VLLM_SOURCES names: folders with a package `vllm` in them, or
wheels, separated by colons. `pip download --no-deps vllm==VERSION` gets one; it is read, and never imported.
"""

import ast
import importlib.util
import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from vllm_source import Source, imports, methods, parameters

import kvferry

INSTALLED = importlib.util.find_spec("vllm")
SOURCES = [
    *(Source(Path(place).parent) for place in (INSTALLED.submodule_search_locations if INSTALLED is not None else ())),
    *(Source(Path(place)) for place in os.environ.get("KVFERRY_VLLM_SOURCES", "").split(":") if place),
]
CONNECTORS = Path(kvferry.__file__).parent / "connectors"
FILES = [*(CONNECTORS / "vllm").rglob("*.py"), CONNECTORS / "vllm_plugin.py"]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CACHES = "vllm.v1.kv_cache_interface"


def needed():
    """`features.NEEDED`, which cannot be imported without a vLLM."""
    tree = ast.parse((CONNECTORS / "vllm" / "features.py").read_text(encoding="utf-8"))
    found = [one for one in tree.body if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "NEEDED"]
    return ast.literal_eval(found[0].value)


NEEDED = needed()

# Every hook of every version since 0.29, and why we do without those that we have not. A hook that is not here is new:
# read what vLLM calls it for, and put it down.
OURS = "ours"
NOT_TOLD = "nothing of ours hangs on it"
HOOKS = {
    "__init__": OURS,
    "_get_connector_metadata": NOT_TOLD,
    "bind_connector_metadata": OURS,
    "bind_gpu_block_pool": NOT_TOLD,
    "bind_kv_cache_manager": OURS,  # since 0.30
    "build_connector_meta": OURS,
    "build_connector_worker_meta": "the agents tell each other",
    "build_kv_connector_stats": OURS,
    "build_prom_metrics": OURS,
    "clear_connector_metadata": NOT_TOLD,
    "finish_forward": "caches are read under leases, or step by step behind a milestone",  # since 0.30
    "get_block_ids_with_load_errors": OURS,  # asked by all, answered before 0.30
    "get_external_cache_hit_sources": "all of ours are of one kind: _cache_hit_source",  # since 0.32
    "get_finished": OURS,  # asked before 0.30
    "get_finished_count": "every rank reports every request",
    "get_handshake_metadata": OURS,
    "get_kv_connector_kv_cache_events": NOT_TOLD,
    "get_kv_connector_stats": OURS,
    "get_loaded_kv_cache_group_ids": OURS,  # since 0.32
    "get_mem_pool_context": "caches are registered wherever they lie",  # since 0.31
    "get_num_new_matched_tokens": OURS,
    "get_required_kvcache_layout": "every layout is described",
    "get_transfer_results": OURS,  # since 0.30
    "handle_preemptions": OURS,
    "has_connector_metadata": NOT_TOLD,
    "has_pending_block_frees": "leases are short, and vLLM may preempt meanwhile",  # since 0.30
    "has_pending_push_work": "the agent has a thread of its own",
    "on_new_request": OURS,
    "register_finished_partial_tail": "the whole table of a request is leased",  # since 0.30
    "register_kv_caches": OURS,
    "request_finished": OURS,
    "request_finished_all_groups": OURS,
    "requires_kv_delivery": "what is not delivered is computed again",
    "requires_piecewise_for_cudagraph": OURS,
    "reset_cache": OURS,
    "reset_capture_state": "capturing graphs changes nothing",  # since 0.30
    "restore_kv_caches": OURS,  # since 0.33
    "role": NOT_TOLD,
    "save_kv_layer": OURS,
    "set_host_xfer_buffer_ops": "staging memory has its own",
    "set_xfer_handshake_metadata": "the one that knows of pipelines is asked",
    "set_xfer_handshake_metadata_pp_aware": OURS,
    "shutdown": OURS,
    "start_load_kv": OURS,
    "supports_divergent_local_hybrid_hits": "no: what is fetched begins at one place in all groups",
    "supports_sleep_mode": OURS,  # since 0.33
    "take_events": NOT_TOLD,
    "unregister_kv_caches": OURS,  # since 0.33
    "update_connector_output": OURS,
    "update_state_after_alloc": OURS,
    "wait_for_layer_load": OURS,
    "wait_for_save": OURS,
}
SINCE = {
    (0, 30): {
        "bind_kv_cache_manager",
        "finish_forward",
        "get_transfer_results",
        "has_pending_block_frees",
        "register_finished_partial_tail",
        "reset_capture_state",
    },
    (0, 31): {"get_mem_pool_context"},
    (0, 32): {"get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"},
    (0, 33): {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"},
}

# What a layer's specification may say, of the kinds that are described. One that is not here may be about how its
# memory is arranged, which the description has to know.
FIELDS = {
    "KVCacheSpec": {"block_size", "block_stride_alignment", "dcp_sharded", "is_draft"},
    "AttentionSpec": {
        "dcp_sharded",
        "dtype",
        "head_size",
        "head_size_v",
        "kv_quant_mode",
        "max_tp_shards",
        "num_head_slots",
        "num_kv_heads",
        "page_size_padded",
        "state_content_bytes",
        "tokens_per_state",
    },
    "FullAttentionSpec": {"attention_chunk_size", "non_causal", "sliding_window"},
    "SlidingWindowSpec": {"extra_retained_tokens", "sliding_window"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MLAAttentionSpec": {
        "alignment",
        "cache_dtype_str",
        "cache_role",
        "head_size_v",
        "is_index_group_leader",
        "model_version",
        "non_causal_multi_token_decode",
        "storage_block_size",
        "tokens_per_state",
        "topk_buffer_width",
    },
    "SlidingWindowMLASpec": {
        "alignment",
        "bounded_replay",
        "cache_dtype_str",
        "head_size_v",
        "model_version",
        "tokens_per_state",
    },
    "MambaSpec": {
        "dtypes",
        "mamba_cache_mode",
        "mamba_type",
        "num_heads",
        "num_prefill_checkpoint_blocks",
        "num_speculative_blocks",
        "page_size_padded",
        "prefill_checkpoint_alignment",
        "shapes",
        "tokens_per_state",
        "tp_replicated",
    },
}

# What is read from objects that vLLM hands over, beside what `features.NEEDED` has.
USED = {
    ("vllm.config.cache", "CacheConfig"): {"cache_dtype", "enable_prefix_caching"},
    ("vllm.config.kv_transfer", "KVTransferConfig"): {
        "engine_id",
        "kv_buffer_device",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    },
    ("vllm.config.lora", "LoRAConfig"): {"target_modules"},
    ("vllm.config.model", "ModelConfig"): {
        "dtype",
        "enable_sleep_mode",
        "get_total_num_kv_heads",
        "hf_text_config",
        "is_encoder_decoder",
        "multimodal_config",
        "runner_type",
        "use_mla",
    },
    ("vllm.config.multimodal", "MultiModalConfig"): {
        "media_io_kwargs",
        "mm_processor_cache_gb",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    },
    ("vllm.config.parallel", "ParallelConfig"): {
        "cp_kv_cache_interleave_size",
        "data_parallel_index",
        "data_parallel_size",
        "decode_context_parallel_size",
        "enable_elastic_ep",
        "tensor_parallel_size",
        "use_ubatching",
        "worker_extension_cls",
        "world_size",
    },
    ("vllm.config.vllm", "VllmConfig"): {
        "cache_config",
        "compilation_config",
        "kv_transfer_config",
        "lora_config",
        "model_config",
        "parallel_config",
        "speculative_config",
    },
    ("vllm.config.compilation", "CompilationConfig"): {"static_forward_context"},
    ("vllm.lora.request", "LoRARequest"): {"is_3d_lora_weight", "lora_int_id", "lora_name", "lora_path"},
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): {"identifier", "mm_hash", "mm_position", "modality"},
    ("vllm.sampling_params", "SamplingParams"): {"prompt_logprobs"},
    ("vllm.v1.core.sched.output", "CachedRequestData"): {"num_computed_tokens", "req_ids"},
    ("vllm.v1.core.sched.output", "NewRequestData"): {"num_computed_tokens", "req_id"},
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    },
    ("vllm.v1.engine.async_llm", "AsyncLLM"): {"collective_rpc", "engine_core", "vllm_config"},
    ("vllm.v1.engine.core", "EngineCore"): {"add_lora"},
    ("vllm.v1.engine.core_client", "MPClient"): {"_finalizer"},
    (CACHES, "KVCacheConfig"): {"kv_cache_groups", "num_blocks"},
    (CACHES, "KVCacheGroupSpec"): {"kv_cache_spec", "layer_names"},
    (CACHES, "UniformTypeKVCacheSpecs"): {"kv_cache_specs"},
    ("vllm.v1.outputs", "KVConnectorOutput"): {"finished_sending"},
    ("vllm.v1.request", "Request"): {
        "_all_token_ids",
        "all_token_ids",
        "get_skip_reading_prefix_cache",
        "kv_transfer_params",
        "lora_request",
        "max_tokens",
        "mm_features",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "prompt_embeds",
        "prompt_is_token_ids",
        "prompt_token_ids",
        "request_id",
        "resumable",
        "sampling_params",
        "status",
    },
    ("vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope", "Phi3LongRoPEScaledRotaryEmbedding"): {
        "use_long_rope"
    },
}

# What is reached through a module, or called with these words.
REACHED = {
    "vllm": {"__version__"},
    "vllm.envs": {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "is_set"},
    "vllm.v1.attention.backends.registry": {"GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV"},
}
CALLED = {
    ("vllm._custom_ops", "cpu_attn_reshape_and_cache"): ("isa", "kv_cache_dtype"),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"): (
        "start_token_idx",
        "end_token_idx",
        "start_mm_idx",
    ),
}

in_every_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def hooks(source: Source):
    """By name, of both base classes."""
    return {
        name: function
        for one in ("SupportsHMA", "KVConnectorBase_V1")
        for name, function in methods(source.class_of(BASE, one)).items()
    }


def ours():
    tree = ast.parse((CONNECTORS / "vllm" / "connector.py").read_text(encoding="utf-8"))
    return methods(next(node for node in tree.body if isinstance(node, ast.ClassDef)))


@in_every_source
def test_every_name_that_is_imported_is_there(source):
    wanted = {one for file in FILES for one in imports(ast.parse(file.read_text(encoding="utf-8")))}
    assert len(wanted) > 30
    missing = [one for one in sorted(wanted) if not (source.has(*one) if one[1] else source.module(one[0]))]
    assert missing == []


@in_every_source
def test_every_hook_is_known(source):
    assert sorted(set(hooks(source)) - set(HOOKS)) == []


@in_every_source
def test_no_hook_has_gone(source):
    late = set().union(*SINCE.values())
    assert sorted(set(HOOKS) - late - set(hooks(source))) == []


@in_every_source
def test_the_hooks_of_one_version_come_together(source):
    """So that a hook's absence says of which version it is."""
    there = set(hooks(source))
    assert [version for version, names in SINCE.items() if names & there not in (set(), names)] == []


@in_every_source
def test_hooks_have_our_parameters(source):
    mine, theirs = ours(), hooks(source)
    wrong = {
        name: (parameters(mine[name]), parameters(theirs[name]))
        for name in HOOKS
        if name in mine and name in theirs and parameters(mine[name]) != parameters(theirs[name])
    }
    assert wrong == {}


def test_what_is_called_ours_is():
    assert sorted(name for name, why in HOOKS.items() if (why == OURS) != (name in ours())) == []


@in_every_source
@pytest.mark.parametrize("kind", FIELDS)
def test_no_cache_says_what_is_unknown(source, kind):
    node = source.class_of(CACHES, kind)
    found = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
    assert sorted(found - FIELDS[kind]) == []


@in_every_source
@pytest.mark.parametrize(("module", "name"), sorted({*USED, *NEEDED}))
def test_what_is_read_of_vllms_objects_is_there(source, module, name):
    wanted = USED.get((module, name), set()) | set(NEEDED.get((module, name), ()))
    assert sorted(wanted - source.members(module, name)) == []


@in_every_source
@pytest.mark.parametrize("module", REACHED)
def test_what_is_reached_through_a_module_is_there(source, module):
    assert [name for name in sorted(REACHED[module]) if not source.has(module, name)] == []


@in_every_source
@pytest.mark.parametrize(("module", "name"), CALLED)
def test_functions_take_our_words(source, module, name):
    found = [one for one in source.module(module).body if getattr(one, "name", "") == name]
    assert set(CALLED[module, name]) <= set(parameters(found[0]))


@in_every_source
def test_the_blocks_of_a_request_are_told_one_way_or_the_other(source):
    found = source.members("vllm.v1.core.sched.output", "KVConnectorBlockState")
    assert "get_block_ids" in found or "block_ids" in found


@in_every_source
def test_the_figures_that_we_add_to_are_there(source):
    node = source.class_of("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats", "NixlKVConnectorStats")
    words = {one.value for one in ast.walk(methods(node)["reset"]) if isinstance(one, ast.Constant)}
    assert words >= {
        "bytes_transferred",
        "num_descriptors",
        "num_failed_transfers",
        "num_kv_expired_reqs",
        "post_duration",
        "transfer_duration",
    }


def test_a_hook_that_a_wheel_brings_is_noticed(tmp_path):
    wheel = tmp_path / "vllm-9.0.0-py3-none-any.whl"
    text = "class SupportsHMA: ...\nclass KVConnectorBase_V1:\n    def shutdown(self): ...\n    def melt(self): ...\n"
    with ZipFile(wheel, "w") as zipped:
        zipped.writestr(BASE.replace(".", "/") + ".py", text)
    source = Source(wheel)
    assert sorted(set(hooks(source)) - set(HOOKS)) == ["melt"]
    assert source.has(BASE, "SupportsHMA")
    assert not source.has(BASE, "KVConnectorTransferResults")
    assert not source.has("vllm.v1", "anything")
