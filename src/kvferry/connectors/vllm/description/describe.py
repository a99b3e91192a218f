"""From what vLLM tells a worker's connector in `register_kv_caches` to our description of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connectors.vllm.description.attention import attention_parts, latent_parts
from kvferry.connectors.vllm.description.engine_facts import EngineFacts, LayerFacts, engine_facts, prefix_of
from kvferry.connectors.vllm.description.groups import GroupFacts
from kvferry.connectors.vllm.description.parts import Cache, Parts, optional, unsupported
from kvferry.connectors.vllm.description.rank_description import Building, Described
from kvferry.connectors.vllm.description.recurrent import recurrent_parts
from kvferry.connectors.vllm.features import is_in_device_memory
from kvferry.connectors.vllm_keys import IF_BOTH, DraftLayers
from kvferry.errors import LayoutError
from kvferry.layout import Region

__all__ = ["Described", "EngineFacts", "GroupFacts", "LayerFacts", "describe", "engine_facts"]

# By exact class: a subclass may arrange its memory in any way.
_KINDS: Mapping[type[KVCacheSpec], Callable[[Cache], Parts]] = {
    FullAttentionSpec: attention_parts,
    SlidingWindowSpec: attention_parts,
    ChunkedLocalAttentionSpec: attention_parts,
    MLAAttentionSpec: latent_parts,
    SlidingWindowMLASpec: latent_parts,
    MambaSpec: recurrent_parts,
}


def describe(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    engine: EngineFacts,
    draft_layers: DraftLayers = True,
) -> Described:
    """Describe every cache that vLLM transfers.

    `kv_caches` has a layer's cache by its name, as registered. Without `draft_layers` a speculator's are left out; with
    `IF_BOTH` the other side may lack them.
    Raises LayoutError for what cannot be described, naming the layer and its specification.
    """
    building = Building()
    for index in kv_cache_config.transfer_group_ids:
        for cache in _caches(kv_cache_config, index, kv_caches, engine):
            if cache.is_draft and draft_layers is not True:
                _check_leaving(cache, kv_cache_config)
                if draft_layers is False:
                    continue
            if type(cache.spec) not in _KINDS:
                raise unsupported(cache.layer, cache.spec, "this kind of cache is not supported")
            parts = _KINDS[type(cache.spec)](cache)
            if cache.is_draft and draft_layers == IF_BOTH:
                parts = optional(parts)
            building.add(index, cache.layer, parts, *_region(building, cache.tensor))
    if not building.placements:
        raise LayoutError("vLLM has registered no cache that can be transferred", found=", ".join(kv_caches) or "none")
    return building.described(kv_cache_config.transfer_group_ids)


def _region(building: Building, tensor: torch.Tensor) -> tuple[int, int]:
    """The number of the tensor's allocation, and where in it the tensor begins."""
    storage = tensor.untyped_storage()
    on_host = tensor.device.type == "cpu"
    kind, device = ("dram", 0) if on_host else ("vram", max(tensor.get_device(), 0))
    region = Region(storage.data_ptr(), storage.nbytes(), kind, device)
    return building.region(region), tensor.data_ptr() - region.address


def _check_leaving(cache: Cache, config: KVCacheConfig) -> None:
    """What a speculator reads of a prompt that was computed elsewhere is what was last written there. Old keys and
    values only make bad guesses, which the model corrects. What has another format, such as a recurrent state, may not
    be numbers when read as keys: nobody knows what the model makes of guesses out of those."""
    if config.needs_kv_cache_zeroing:
        hint = "leave transfer_draft_layers out, and give both servers the same speculator"
        raise unsupported(
            cache.layer, cache.spec, "what its blocks hold before it writes there may be no numbers", hint=hint
        )


def _caches(
    config: KVCacheConfig, index: int, kv_caches: Mapping[str, torch.Tensor], engine: EngineFacts
) -> Iterator[Cache]:
    """The caches of a group's layers. A layer that reuses the cache of an earlier one has none of its own."""
    group, seen = config.kv_cache_groups[index], set()
    for layer in group.layer_names:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            if layer not in spec.kv_cache_specs:
                continue
            spec = spec.kv_cache_specs[layer]
        if not is_in_device_memory(group, spec):
            raise unsupported(layer, spec, "it lies in another kind of memory")
        if layer not in kv_caches:
            raise LayoutError(f"vLLM has not registered the cache of layer {layer}", found=", ".join(kv_caches))
        tensor = kv_caches[layer]
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield Cache(layer, prefix_of(layer, engine), spec, tensor, config.num_blocks, engine)
