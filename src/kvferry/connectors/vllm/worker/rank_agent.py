"""The agent of one rank of vLLM, and what is known of the cache that it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry import Agent, Notice, open_agent
from kvferry.connectors.vllm.description.groups import may_grow
from kvferry.connectors.vllm.description.rank_description import Described
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.worker.deferred_commands import DeferredCommands, end_of_request
from kvferry.connectors.vllm.worker.early_prefills import EarlyPrefills, Source
from kvferry.connectors.vllm.worker.open_requests import OpenRequests
from kvferry.connectors.vllm.worker.rank_cache import RankCache
from kvferry.layout import contents


@dataclass(frozen=True, slots=True)
class RankAgent:
    """The agent, and the description by which vLLM's block tables become its own. `cache` names what all ranks keep.
    With `may_grow` a prefill can be read while it is computed. `is_on_device` says where the caches lie."""

    agent: Agent
    described: Described
    early_prefills: EarlyPrefills
    deferred: DeferredCommands
    cache: str = ""
    may_grow: bool = False
    is_on_device: bool = False


@dataclass(frozen=True, slots=True)
class RankAgents:
    """Opens the agents of one rank: one after its start, and another one after each sleep. `notify` hears of what ends,
    and `requests` are those that vLLM waits for."""

    config: VllmConfig
    settings: Settings
    kv_cache_config: KVCacheConfig
    notify: Callable[[Notice], None]
    requests: OpenRequests

    def open(self, ours: RankCache) -> RankAgent:
        """Open an agent, which does not begin yet. Raises ConfigurationError when it cannot be set up."""
        config, described = self.settings.agent, ours.described
        port = config.port + ours.rank if config.port else 0
        config = replace(config, epoch=ours.epoch, rank=ours.rank, port=port)
        agent = open_agent(config, ours.cache, self.notify)
        ends = described.layer_ends if self.settings.layer_wise else {}
        speculates = self.config.speculative_config is not None
        return RankAgent(
            agent,
            described,
            EarlyPrefills(Source(agent, described, ours.milestone), self.requests, ends),
            DeferredCommands(end_of_request(ours.milestone, speculates=speculates)),
            contents(*ours.cache.layouts),
            may_grow=described.counts_alike and may_grow(self.kv_cache_config),
            is_on_device=ours.cache.device != "cpu",
        )
