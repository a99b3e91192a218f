"""`TPUConnector`: our connector for vLLM, and the hook by which tpu-inference's runner hands over its arrays."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.connectors.vllm import FerryConnector
from kvferry.connectors.vllm.metadata import Orders, RankAddress
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm_tpu.features import check_engine
from kvferry.connectors.vllm_tpu.ranks import Ranks
from kvferry.errors import ConfigurationError


class TPUConnector(FerryConnector):
    """Moves requests' caches between tpu-inference and any other engine that kvferry knows.

    Raises ConfigurationError for settings that are not supported.
    """

    _workers: list[Ranks]  # type: ignore[assignment]

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_engine(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def _new_worker(self, vllm_config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig) -> Ranks:  # type: ignore[override]
        return Ranks(vllm_config, settings, kv_cache_config)

    # --- in the scheduler ---

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """tpu-inference's worker says nothing of where its ranks listen; it is in this process, and can be asked."""
        worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(worker, TPUConnector):
            raise ConfigurationError(
                "the scheduler does not know where its engine's ranks listen",
                found="no TPUConnector of a worker in the scheduler's process",
                expected="tpu-inference on one host, without pipeline parallelism, where both are in one",
            )
        self._scheduler.set_ranks(worker.addresses())

    # --- in the worker ---

    def register_runner(self, runner: Any) -> None:
        """Called once the runner has its arrays; before any step."""
        for ranks in self._workers:
            ranks.register(runner)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Nothing: the arrays are others after each step, and the runner has the newest."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step is one program."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """tpu-inference does not sleep."""
        return False

    def addresses(self) -> tuple[RankAddress, ...]:
        """Where the agents of all ranks listen."""
        return tuple(address for ranks in self._workers for address in ranks.addresses())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The last word before the runner donates its arrays."""
        for ranks in self._workers:
            ranks.look_for_new_arrays()
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, Orders):
            for ranks in self._workers:
                ranks.begin_step()

    def wait_for_save(self) -> None:
        """The first word after the runner has got new arrays for those that it has donated."""
        for ranks in self._workers:
            ranks.end_step()
