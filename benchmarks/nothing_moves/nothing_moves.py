"""A connector of vLLM that moves nothing, for `vllm_pd.py`: what vLLM's own steps take when a cache is loaded
asynchronously, whoever brings it. Its answers mean nothing.

A server imports it from this folder, which is on its PYTHONPATH.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass
class Expected(KVConnectorMetadata):
    """The requests that wait for a cache, from the scheduler to the worker."""

    request_ids: set[str] = field(default_factory=set)


class NothingMoves(KVConnectorBase_V1, SupportsHMA):
    """Says of every cache, in the step that asks for it, that all of it is there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._expected: set[str] = set()

    # --- in the scheduler ---

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if params.get("do_remote_prefill") and missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens and request.kv_transfer_params:
            self._expected.add(request.request_id)
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        expected, self._expected = Expected(self._expected), set()
        return expected

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        return False, {"do_remote_prefill": True} if params.get("do_remote_decode") else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # --- in the workers ---

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def wait_for_save(self) -> None:
        """Nothing to do."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        expected = self._get_connector_metadata()
        return None, expected.request_ids if isinstance(expected, Expected) else set()
