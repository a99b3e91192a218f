"""What a worker's half is given of the cache that it moves: a description, and how its agent gets at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry import Cache, new_epoch
from kvferry.connectors.vllm.description.describe import describe, engine_facts
from kvferry.connectors.vllm.description.rank_description import Described
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.worker.deferred_commands import Milestone, at_once
from kvferry.connectors.vllm.worker.ranks import Introduction, meet
from kvferry.devices import cache_device


@dataclass(frozen=True, slots=True)
class RankCache:
    """The cache of rank number `rank` of an engine, which all ranks call by the same `epoch`. `milestone` marks what
    the device is to have done before anybody may read what has been begun."""

    described: Described
    cache: Cache
    rank: int
    epoch: str
    milestone: Milestone = at_once


def of_tensors(
    config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> RankCache:
    """This rank's, in the tensors that vLLM registers; meets the other ranks of the engine.

    Raises LayoutError for caches that cannot be described, ConfigurationError for a device that cannot be reached.
    """
    # vLLM may have changed its configuration since it has made us.
    described = describe(kv_cache_config, kv_caches, engine_facts(config), settings.draft_layers)
    everyone, rank = meet(Introduction(new_epoch(), described.layout), config.parallel_config.world_size)
    layouts = tuple(introduction.layout for introduction in everyone)
    on = cache_device(next(iter(kv_caches.values())).device, settings.buffer_device, settings.staging_memory)
    return RankCache(described, on.cache(layouts, described.memories), rank, everyone[0].epoch, on.milestone)
