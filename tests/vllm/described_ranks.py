"""Ranks as vLLM sets them up, with its specifications and its allocator, and what the connector says of them."""

import importlib
import warnings
from dataclasses import dataclass, fields

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import numpy as np
import torch
from engines.oracle import Memory
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connectors.vllm.description.describe import EngineFacts, LayerFacts, describe

HEADS, DIM, BLOCKS = 4, 32, 7
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


@dataclass
class Rank:
    """One rank as vLLM would set it up, and what we say of it."""

    config: KVCacheConfig
    caches: dict
    engine: EngineFacts

    def __post_init__(self):
        self.described = describe(self.config, self.caches, self.engine)
        self.layout = self.described.layout
        storages = {c.untyped_storage().data_ptr(): c.untyped_storage() for c in self.caches.values()}
        self.memory = Memory(
            self.layout,
            {at: torch.tensor([], dtype=torch.uint8).set_(storage).numpy() for at, storage in storages.items()},
        )

    def scramble(self, seed=0):
        for at, buffer in self.memory.buffers.items():
            buffer[:] = np.random.default_rng(seed + at % 7).integers(0, 255, len(buffer), np.uint8)

    def bytes_at(self, address, size):
        return self.memory.at(address, size).tobytes()


def make_rank(groups, engine, layout=KVCacheLayout.LBHNC, kernel=None, num_blocks=BLOCKS):
    """A rank with vLLM's own allocation: all groups take blocks from the same memory, as in hybrid models."""
    made = [KVCacheGroupSpec(list(names), spec) for spec, names in groups]
    tensors = [tensor for group in made for tensor in make_tensors(group, layout, num_blocks)]
    size = max(sum(spec.page_size_bytes * num_blocks for _ in names) for spec, names in groups)
    for tensor in tensors:
        tensor.size = size
    config = KVCacheConfig(num_blocks, tensors, made)
    kernels = [kernel or next(iter(iter_layer_specs(g.kv_cache_spec))).block_size for g in made]
    return Rank(config, allocate_kv_cache(config, torch.device("cpu"), layout, kernels), engine)


def make_tensors(group, layout, num_blocks):
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        offset, found = 0, []
        for name in group.layer_names:
            page = spec.kv_cache_specs[name].page_size_bytes
            found.append(KVCacheTensor(0, [name], page * num_blocks, page, offset))
            offset += page * num_blocks
        return found
    layer_stride, block_stride, *_ = compute_layout_strides(spec, num_blocks, len(group.layer_names), layout)
    return [KVCacheTensor(0, list(group.layer_names), layer_stride, block_stride)]


def facts(names=NAMES, backend="FLASH_ATTN", **changes):
    layers = {name: LayerFacts(backend=backend, isa="vec" if backend == "CPU_ATTN" else "") for name in names}
    return EngineFacts(**{"num_layers": 4, "num_heads": HEADS, "layers": layers, "model_dtype": "float32"} | changes)


def full(block=16, heads=HEADS, kind=FullAttentionSpec, **changes):
    return kind(block_size=block, num_kv_heads=heads, head_size=DIM, dtype=torch.float32, **changes)


def spec_of(kind, **values):
    """A specification without what this vLLM's does not have."""
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def mla(block=16, **changes):
    values = {"block_size": block, "num_kv_heads": 1, "head_size": 48, "dtype": torch.float32, "max_tp_shards": 1}
    return spec_of(MLAAttentionSpec, **(values | changes))
