"""`FerryConnector`: vLLM's connector interface, answered by one half in the scheduler and one in each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvferry import Reference
from kvferry.connectors.vllm.description.groups import forgets, has_windows
from kvferry.connectors.vllm.features import (
    CACHE_HIT_SOURCE,
    TransferResults,
    check_caches,
    check_role,
    check_version,
    check_windows,
    num_recomputed,
)
from kvferry.connectors.vllm.metadata import Orders, RankAddress
from kvferry.connectors.vllm.scheduler.prompts import prompts_of
from kvferry.connectors.vllm.scheduler.scheduler import Scheduler, Terms
from kvferry.connectors.vllm.settings import Settings, settings_of, speak_like_vllm
from kvferry.connectors.vllm.stats import FerryPromMetrics, FerryStats
from kvferry.connectors.vllm.worker.worker import Worker
from kvferry.errors import ConfigurationError
from kvferry.kv_transfer_params import Reach


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves requests' caches between vLLM and any other engine that kvferry knows.

    vLLM makes one in its scheduler and one in every worker. Raises ConfigurationError for a version or settings that
    are not supported.
    """

    _cache_hit_source = CACHE_HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_version()
        speak_like_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        check_caches(vllm_config, forgets(kv_cache_config))
        check_role(vllm_config)
        if has_windows(kv_cache_config):
            check_windows(vllm_config)
        is_scheduler = role == KVConnectorRole.SCHEDULER
        terms = Terms(
            reach=Reach.ANY_HOST if settings.agent.token else Reach.THIS_HOST,
            num_recomputed=num_recomputed(vllm_config),
            context_parallel=vllm_config.parallel_config.decode_context_parallel_size,
            may_fetch=vllm_config.kv_transfer_config.is_kv_consumer,
        )
        prompts = [prompts_of(vllm_config)] if is_scheduler else []
        names = settings.agent.engine_id, kv_cache_config
        self._schedulers = [Scheduler(*names, one, terms) for one in prompts]
        self._workers = [] if is_scheduler else [self._new_worker(vllm_config, settings, kv_cache_config)]

    def _new_worker(self, vllm_config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig) -> Worker:
        return Worker(vllm_config, settings, kv_cache_config)

    @property
    def _scheduler(self) -> Scheduler:
        for scheduler in self._schedulers:
            return scheduler
        raise ConfigurationError("a hook of the scheduler was called in a worker")

    @property
    def _worker(self) -> Worker:
        for worker in self._workers:
            return worker
        raise ConfigurationError("a hook of a worker was called in the scheduler")

    # --- in the scheduler ---

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [metadata[key] for key in sorted(metadata)]
        ours = tuple(rank for rank in ranks if isinstance(rank, RankAddress))
        if len(ours) != len(ranks):
            # Of several connectors vLLM passes on what the first one says that says anything.
            raise ConfigurationError(
                "another connector hides from kvferry's where its ranks listen",
                found=", ".join(sorted({type(rank).__name__ for rank in ranks})),
                expected="FerryConnector before it among the connectors of MultiConnector",
            )
        self._scheduler.set_ranks(ours)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.unfilled.bind(kv_cache_manager.evict_blocks)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.num_new_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._scheduler.scheduled(scheduler_output)
        return self._scheduler.take_orders(is_idle=not scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.sent(connector_output.finished_sending or ())
        self._scheduler.unfilled.received(connector_output.finished_recving or ())

    def reset_cache(self) -> bool:
        """End the leases of all that has been computed. Their blocks are free some steps later."""
        self._scheduler.reset()
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    # --- in a worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self._worker.address()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The very first word of a step: nothing has been written yet to blocks that other requests get in it."""
        if isinstance(kv_connector_metadata, Orders):
            self._worker.withdraw(kv_connector_metadata.withdrawn)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The first word of a step: `start_load_kv` comes after the forward pass, which would delay everything."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, Orders):
            self._worker.obey(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the orders have been obeyed when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after all of its cache is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The cache is read where it lies; what a layer has computed may leave before its step has ended."""
        self._worker.layer_ended(layer_name)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM says when the memory of the caches goes and comes."""
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """vLLM asks for `get_handshake_metadata` next: the epoch is a new one, and the address may be."""
        self._worker.restore()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nobody is called in the middle of a whole graph."""
        return extra_config.get("layer_wise") is True

    def wait_for_save(self) -> None:
        """Nothing: the cache is read where it lies."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The question of a vLLM that does not ask `get_transfer_results`; the next one follows at once."""
        results = self._worker.results()
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Nothing where vLLM is told which requests have failed."""
        return self._worker.failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Asked in the scheduler as well: it says what was declined."""
        told = [half.take_stats() for half in self._workers] + [half.take_stats() for half in self._schedulers]
        return next((stats for stats in told if not stats.is_empty()), None)

    def facts(self) -> dict[str, str]:
        """Who this engine is."""
        return self._worker.facts

    def release(self, reference: Reference) -> str:
        """End a lease that nobody will read; see `Worker.release`."""
        return self._worker.release(reference)

    def withdraw_leases(self, names: Sequence[str]) -> bool:
        """End the leases of requests whose callers have got no answer; see `Worker.withdraw_leases`."""
        return self._worker.withdraw_leases(names)

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.close()
        for scheduler in self._schedulers:
            scheduler.close()

    # --- in the front end ---

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return FerryStats(data=data) if data is not None else FerryStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
