"""From what vLLM tells a worker's connector in `register_kv_caches` to our description of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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

from kvferry import Memory
from kvferry.connectors.vllm.description.attention import attention_parts, latent_parts
from kvferry.connectors.vllm.description.engine_facts import EngineFacts, LayerFacts, engine_facts, prefix_of
from kvferry.connectors.vllm.description.groups import GroupFacts
from kvferry.connectors.vllm.description.parts import Cache, Part, Parts, optional, unsupported
from kvferry.connectors.vllm.description.recurrent import recurrent_parts
from kvferry.connectors.vllm.features import is_in_device_memory
from kvferry.connectors.vllm_keys import IF_BOTH, DraftLayers
from kvferry.errors import LayoutError
from kvferry.layout import CacheGroup, Layout, Placement, Region, State, TokenRange

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


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's layout, the memory it lies in (one per allocation), and where its groups' block tables come from.

    The layout may have more groups than vLLM: layers of one that must be counted differently are apart here.
    `layer_ends` has for each layer, in the layout's order, how many states there are up to its own.
    """

    layout: Layout
    memories: tuple[Memory, ...]
    groups: tuple[GroupFacts, ...]
    transfer_group_ids: tuple[int, ...]
    layer_ends: Mapping[str, int] = field(default_factory=dict)

    def tables(self, tables: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """One block table per group of the layout, from one per transferable group of vLLM's."""
        return tuple(tuple(tables[self.transfer_group_ids.index(group.index)]) for group in self.groups)

    @property
    def nowhere(self) -> tuple[tuple[int, ...], ...]:
        """The block tables of a request that has no blocks yet."""
        return ((),) * len(self.groups)

    @property
    def counts_alike(self) -> bool:
        """Whether all groups of the layout count the same: tokens, or pieces of so many."""
        return len({group.whole_tokens for group in self.groups}) == 1

    def num_counted(self, num_tokens: int) -> int:
        """What a request of so many tokens is in what the layout counts: that of the group that has most of it."""
        whole = [TokenRange(0, num_tokens)] * len(self.transfer_group_ids)
        return max(tokens.last for tokens in self.ranges(whole))

    def num_complete(self, num_tokens: int) -> int:
        """How much is complete of a request of which so many tokens are computed, where all groups count alike."""
        return num_tokens // max(1, self.groups[0].whole_tokens)

    def ranges(self, ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
        """What to move of each group of the layout, from the tokens wanted of each transferable group of vLLM's."""
        return tuple(group.range(ranges[self.transfer_group_ids.index(group.index)]) for group in self.groups)


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
    building = _Building()
    for index in kv_cache_config.transfer_group_ids:
        for cache in _caches(kv_cache_config, index, kv_caches, engine):
            if cache.is_draft and draft_layers is not True:
                _check_leaving(cache, kv_cache_config)
                if draft_layers is False:
                    continue
            if type(cache.spec) not in _KINDS:
                raise unsupported(cache.layer, cache.spec, "this kind of cache is not supported")
            parts = _KINDS[type(cache.spec)](cache)
            building.add(index, cache, optional(parts) if cache.is_draft and draft_layers == IF_BOTH else parts)
    if not building.placements:
        raise LayoutError("vLLM has registered no cache that can be transferred", found=", ".join(kv_caches) or "none")
    layout = Layout(tuple(building.states), tuple(building.regions), tuple(building.groups), tuple(building.placements))
    memories = tuple(Memory(region.address, region.size_bytes, -1) for region in building.regions)
    return Described(
        layout, memories, tuple(building.facts), tuple(kv_cache_config.transfer_group_ids), building.layer_ends
    )


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


@dataclass(slots=True)
class _Building:
    """A layout while it grows: regions by allocation, groups by what they count."""

    states: list[State] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    groups: list[CacheGroup] = field(default_factory=list)
    facts: list[GroupFacts] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    layer_ends: dict[str, int] = field(default_factory=dict)

    def add(self, index: int, cache: Cache, parts: Parts) -> None:
        region, start = self._region(cache.tensor)
        group = self._group(GroupFacts(index, parts.whole_tokens, *parts.limits), parts.group)
        for part in parts.parts:
            if any(part.state.name == state.name for state in self.states):
                hint = "report this with the model's name"
                raise LayoutError(f"layer {cache.layer} has the name of another", found=part.state.name, hint=hint)
            self.states.append(part.state)
            self.placements.append(_placement(part, region, group, start))
        self.layer_ends[cache.layer] = len(self.states)

    def _region(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of the tensor's allocation, and where in it the tensor begins."""
        storage = tensor.untyped_storage()
        on_host = tensor.device.type == "cpu"
        kind, device = ("dram", 0) if on_host else ("vram", max(tensor.get_device(), 0))
        region = Region(storage.data_ptr(), storage.nbytes(), kind, device)
        if region not in self.regions:
            self.regions.append(region)
        return self.regions.index(region), tensor.data_ptr() - region.address

    def _group(self, facts: GroupFacts, group: CacheGroup) -> int:
        for number, known in enumerate(zip(self.facts, self.groups, strict=True)):
            if known == (facts, group):
                return number
        self.facts.append(facts)
        self.groups.append(group)
        return len(self.groups) - 1


def _placement(part: Part, region: int, group: int, start: int) -> Placement:
    return Placement(
        part.state.name,
        region,
        group,
        start + part.offset,
        part.spans,
        part.strides,
        part.block_stride,
        part.token_stride,
    )
