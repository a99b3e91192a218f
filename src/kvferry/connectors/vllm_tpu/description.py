"""From tpu-inference's arrays to our description of a rank, which is a device.

An array is `[block, token, row, packing, dim]`, of which a device has some rows. A token's rows, one after the other,
are the key and the value of its first head, of its second head and so on: each as wide as a row, padded, or both in one
row of 128 where heads have 64 dims. So many elements are packed as 32 bits have, and rows are filled up to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connectors.vllm.description.engine_facts import EngineFacts, prefix_of
from kvferry.connectors.vllm.description.parts import Part, Parts, unsupported
from kvferry.connectors.vllm.description.rank_description import Building, Described
from kvferry.errors import LayoutError
from kvferry.jax_caches import FIRST_ADDRESS
from kvferry.layout import Axis, CacheGroup, Region, Span, State, shares

LANES = 128
HALF_LANES = 64
"""The one head size for which there is a kernel that keeps a key and its value in one row."""
PACKED_BITS = 32
FLOATS = frozenset({"bfloat16", "float16", "float32"})


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of an engine: their shapes and dtypes, and which one each layer has. `num_ranks` devices share the
    rows of each. `num_heads` of `head_dim` are those of the model; of fewer heads than devices there are copies."""

    kv_cache_config: KVCacheConfig
    arrays: Sequence[Any]
    index: dict[str, int]
    num_ranks: int
    num_layers: int
    num_heads: int
    head_dim: int


def arrays_of(runner: Any, kv_cache_config: KVCacheConfig) -> Arrays:
    """What tpu-inference's runner has."""
    model = runner.vllm_config.model_config
    return Arrays(
        kv_cache_config,
        tuple(runner.kv_caches),
        dict(runner.layer_name_to_kvcache_index),
        int(runner.mesh.size),
        int(getattr(model.hf_text_config, "num_hidden_layers", 0) or 0),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )


def describe_ranks(arrays: Arrays) -> list[Described]:
    """The description of each rank. Raises LayoutError for what cannot be described, naming the layer."""
    return [_described(arrays, rank) for rank in range(arrays.num_ranks)]


def _described(arrays: Arrays, rank: int) -> Described:
    building = Building()
    address = FIRST_ADDRESS
    for array in arrays.arrays:
        if not hasattr(array, "nbytes"):
            raise LayoutError("a layer keeps a state of fixed size", expected="layers with attention only")
        size = array.nbytes // arrays.num_ranks
        building.region(Region(address, size, "vram", 0))
        address += size
    engine, config = EngineFacts(num_layers=arrays.num_layers), arrays.kv_cache_config
    for index in config.transfer_group_ids:
        for layer, spec in _layers(config.kv_cache_groups[index]):
            parts = _parts(arrays, rank, layer, spec, prefix_of(layer, engine))
            building.add(index, layer, parts, arrays.index[layer], 0)
    return building.described(config.transfer_group_ids)


def _layers(group: Any) -> Iterator[tuple[str, Any]]:
    for layer in group.layer_names:
        spec = group.kv_cache_spec
        yield layer, spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _parts(arrays: Arrays, rank: int, layer: str, spec: Any, prefix: str) -> Parts:
    array = arrays.arrays[arrays.index[layer]]
    heads = shares(arrays.num_heads, arrays.num_ranks, f"axis head of layer {layer}")[rank]
    width = _check(arrays, layer, spec, array, len(heads))
    dtype, item_bytes = array.dtype.name, int(array.dtype.itemsize)
    window = int(getattr(spec, "sliding_window", 0) or 0)
    token_bytes = math.prod(array.shape[2:]) // arrays.num_ranks * item_bytes
    axes = Axis("head", arrays.num_heads), Axis("dim", arrays.head_dim)
    spans, strides = (heads, Span(0, arrays.head_dim)), (2 * width * item_bytes, item_bytes)
    group = CacheGroup(spec.block_size, array.shape[0], 0, 1, tail_is_free=True)
    parts = tuple(
        Part(
            State(f"{prefix}.{kind}", dtype, item_bytes, axes, True, window),
            offset * item_bytes,
            spans,
            strides,
            spec.block_size * token_bytes,
            token_bytes,
        )
        for kind, offset in (("k", 0), ("v", width))
    )
    return Parts(group, parts)


def _check(arrays: Arrays, layer: str, spec: Any, array: Any, num_heads: int) -> int:
    """How many elements a key has with its padding. Raises LayoutError where the array is not what its specification
    says."""
    is_full = type(spec) is FullAttentionSpec
    if not is_full and type(spec) is not SlidingWindowSpec:
        raise unsupported(layer, spec, "tpu-inference keeps it in another way")
    if is_full and (spec.sliding_window or spec.attention_chunk_size):
        raise unsupported(
            layer, spec, "the size of its window is unknown", hint="leave --disable-hybrid-kv-cache-manager out"
        )
    if array.dtype.name not in FLOATS:
        hint = "leave --kv-cache-dtype out"
        raise unsupported(layer, spec, "every engine scales 8-bit caches on its own", found=array.dtype.name, hint=hint)
    dim = arrays.head_dim
    width = dim if dim == HALF_LANES else -(-dim // LANES) * LANES
    packing = PACKED_BITS // (8 * int(array.dtype.itemsize))
    rows = -(-2 * num_heads * width // (max(width, LANES) * packing))
    expected = (array.shape[0], spec.block_size, rows * arrays.num_ranks, packing, max(width, LANES))
    if (*array.shape,) != expected or spec.head_size != width:
        found = f"{tuple(array.shape)}, heads of {spec.head_size}"
        raise unsupported(layer, spec, f"expected an array {expected} with heads of {width}", found=found)
    return width
