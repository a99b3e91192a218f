"""Every model for which vLLM and transformers have a class: what vLLM's own layers keep of a request, beside what the
catalog reads from the config that the class makes from nothing. Equal, or refused.

Layers are built on the meta device, without memory: `make test-catalog` counts them.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from fractions import Fraction
from importlib import resources
from math import lcm, prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.model_executor.model_loader.utils")

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

from kvferry import catalog
from kvferry.catalog import Options
from kvferry.errors import ConfigurationError

pytestmark = [pytest.mark.full, pytest.mark.catalog, pytest.mark.filterwarnings("ignore")]

OPTIONS = Options("auto", draft_layers=False)
MAPPINGS = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
KNOWN = set(ModelRegistry.get_supported_archs())
BOTH = sorted(
    {(family, name) for names in MAPPINGS for family, name in names.items() if isinstance(name, str) and name in KNOWN}
)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's layers ask how many ranks there are. On processors that compute in bfloat16 its CPU build keeps states in
    float32, whatever the model says."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    cleanup_dist_env_and_memory()


def config_of(family: str) -> dict[str, Any]:
    """What its class makes from nothing, in 16 bits."""
    try:
        config: dict[str, Any] = CONFIG_MAPPING[family]().to_dict()
    except Exception as error:  # noqa: BLE001 - some classes need others' configs
        pytest.skip(f"its class makes no config from nothing: {type(error).__name__}")
    for each in (config, config.get("text_config") or {}):
        each["dtype"] = "bfloat16"
    return config


def specs_of(config: dict[str, Any], architecture: str, block_tokens: int, folder: Path) -> list[KVCacheSpec]:
    """vLLM's own description of each layer's cache."""
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    try:
        model = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512
        )
        engine = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=block_tokens))
        with set_current_vllm_config(engine), torch.device("meta"):
            initialize_model(engine)
    except Exception as error:  # noqa: BLE001 - what vLLM does not build from a class's defaults is no witness
        pytest.skip(f"vLLM does not build it: {str(error)[:100]}")
    layers = engine.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(engine) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [spec for spec in specs if spec is not None]


def held(specs: list[KVCacheSpec]) -> tuple[Fraction, int]:
    """Bytes of a token, without what only fills up a block, and of a request whatever its length."""
    fixed = [
        prod(shape) * dtype.itemsize
        for spec in specs
        if isinstance(spec, MambaSpec)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    rows = [
        Fraction(spec.unpadded_page_size_bytes, spec.block_size) for spec in specs if isinstance(spec, AttentionSpec)
    ]
    assert len(fixed) + len(rows) >= len(specs)
    return sum(rows, Fraction(0)), sum(fixed)


def read(entry: catalog.Entry) -> tuple[Fraction, int]:
    """The same of the catalog."""
    states = [kept.state for kept in entry.cache.kept()]
    sizes = [(state, state.item_bytes * prod(axis.extent for axis in state.axes)) for state in states]
    rows = [Fraction(size, state.compress_ratio) for state, size in sizes if state.per_token]
    return sum(rows, Fraction(0)), sum(size for state, size in sizes if not state.per_token)


@pytest.mark.parametrize(("family", "architecture"), BOTH, ids=[family for family, _ in BOTH])
def test_the_catalog_says_what_vllms_layers_keep(family: str, architecture: str, tmp_path: Path) -> None:
    config = config_of(family)
    try:
        entry = catalog.of_config(config, family, OPTIONS)
    except ConfigurationError as refusal:
        pytest.skip(f"refused: {str(refusal).partition('; ')[0][:110]}")
    block_tokens = lcm(16, *(kept.state.compress_ratio for kept in entry.cache.kept()))
    assert read(entry) == held(specs_of(config, architecture, block_tokens, tmp_path))


COMPRESSED = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "n_routed_experts": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
}
"""DeepSeek V4 in four layers, and what vLLM asks for beside what decides a cache."""


def test_the_catalog_says_what_layers_with_entries_of_several_tokens_keep(tmp_path, monkeypatch) -> None:
    """Bytes, tokens an entry, and window of each cache of each layer. Their class makes events of a GPU at once."""
    monkeypatch.setattr(torch.cuda, "Event", object)
    shipped = json.loads((resources.files("kvferry.catalog") / "configs" / "deepseek-v4-flash.json").read_text())
    config = shipped | COMPRESSED
    entry = catalog.of_config(config, "deepseek_v4", Options("fp8_ds_mla", draft_layers=False))
    keys = {"indexer.scale": "indexer.k"}
    expected: dict[tuple[int, str], list[int]] = {}
    for layer in entry.cache.layers:
        for kept in layer.kept:
            name = kept.state.name.removeprefix(f"model.layers.{layer.layer}.")
            found = expected.setdefault((layer.layer, keys.get(name, name)), [0, 0, 0])
            found[:] = found[0] + kept.num_bytes, kept.state.compress_ratio, kept.state.window_tokens
    specs = specs_of(config, "DeepseekV4ForCausalLM", 256, tmp_path)
    theirs = [[s.state_content_size_bytes, s.tokens_per_state, s.sliding_window or 0] for s in specs]
    assert sorted(theirs) == sorted(expected.values())
