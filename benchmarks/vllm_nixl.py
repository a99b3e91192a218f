"""vLLM's NIXL pull worker as far as planning goes: its own functions, with NIXL and the model runner left out.

Everything that computes is imported from the installed vLLM and not changed: `register_local_xfer_handler`,
`add_remote_agent` (which validates the peer, maps its ranks and builds the lists), `_read_blocks_for_req` and
`_compute_desc_ids`. Two things stand in: `NoNixl` for the NIXL agent, and the attributes that `__init__` and
`register_kv_caches` would have read from a running engine. README.md says what that leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

__all__ = ["NoNixl", "Rank", "descriptor_ids", "local_worker", "meet", "needs_splits", "read", "skip_splits"]

LOCAL = "local"
LAYOUT = "LBHNC"
"""The layout that vLLM's connector asks for: per layer and block, head by head, each token's key and value together."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's cache: a region per layer, `num_blocks` blocks of `block_bytes` in each, back to back."""

    tensor_parallel: int
    region_addresses: tuple[int, ...]
    num_blocks: int
    block_tokens: int
    block_bytes: int
    num_heads: int
    head_dim: int


@dataclass(slots=True)
class NoNixl:
    """The NIXL agent's place. Counts the descriptors that it is handed, and keeps their lists only when told to."""

    keeps_lists: bool = False
    num_descriptors: int = 0
    lists: list[Any] = field(default_factory=list)
    posted: list[tuple[int, np.ndarray, int, np.ndarray]] = field(default_factory=list)

    def get_xfer_descs(self, descriptors: Any, memory_type: str) -> Any:
        return descriptors

    def prep_xfer_dlist(self, agent: str, descriptors: Any) -> int:
        self.num_descriptors += len(descriptors)
        self.lists.append(descriptors if self.keeps_lists else None)
        return len(self.lists) - 1

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def make_prepped_xfer(self, operation: str, *sides: Any, notif_msg: bytes) -> int:
        self.posted.append(sides)
        return len(self.posted)

    def transfer(self, handle: int) -> None:
        """Nothing moves."""


def local_worker(rank: Rank, total_heads: int, nixl: NoNixl) -> NixlPullConnectorWorker:
    """Rank 0 of a decode engine, with the local list prepared that every worker has before it meets a peer."""
    worker = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
    vars(worker).update(_identity(rank, nixl) | _regions(rank) | _empty_tables())
    worker.transfer_topo = TransferTopology(
        tp_rank=0,
        tp_size=rank.tensor_parallel,
        block_size=rank.block_tokens,
        engine_id=LOCAL,
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=total_heads,
        attn_backends=[],
    )
    worker.kv_caches_base_addr[LOCAL][0] = list(rank.region_addresses)
    worker.dst_num_blocks[LOCAL] = rank.num_blocks
    worker.dst_region_num_blocks[LOCAL] = worker.region_num_blocks
    worker.src_xfer_handles_by_block_size[rank.block_tokens], worker.src_blocks_data = (
        worker.register_local_xfer_handler(rank.block_tokens)
    )
    return worker


def meet(worker: NixlPullConnectorWorker, engine_id: str, ranks: dict[int, Rank]) -> None:
    """What the worker does with the metadata of the ranks that it reads, once they have arrived and are decoded."""
    for number, rank in ranks.items():
        worker._remote_agents[engine_id][0, number] = worker.add_remote_agent(
            _metadata(rank, engine_id), number, rank.tensor_parallel
        )


def needs_splits(worker: NixlPullConnectorWorker, source_tensor_parallel: int) -> bool:
    return worker.transfer_topo.tp_ratio(source_tensor_parallel) < 0


def skip_splits(worker: NixlPullConnectorWorker, source_tensor_parallel: int) -> None:
    """As if a peer of the same shape had been met before: then its split lists are there already."""
    ratio = worker.transfer_topo.tp_ratio(source_tensor_parallel)
    worker.src_xfer_handles_by_tp_ratio[ratio, worker.block_size] = [0] * -ratio


def read(worker: NixlPullConnectorWorker, engine_id: str, source: list[int], target: list[int]) -> None:
    """The whole way from a request's block ids to `transfer`, for every rank that the worker reads."""
    worker.nixl_wrapper.posted.clear()
    worker._recving_transfers.clear()
    remote = RemoteMeta([source], host="", port=0, engine_id=engine_id, request_id="request")
    tensor_parallel = worker.transfer_topo.get_engine_info(engine_id).remote_tp_size
    worker._read_blocks_for_req("request", ReqMeta([target], [target], tensor_parallel, remote=remote))


def descriptor_ids(
    worker: NixlPullConnectorWorker, engine_id: str, source: list[int], target: list[int]
) -> list[np.ndarray]:
    """Only the ids, remote and local, for every rank that the worker reads, with the arguments of `_read_blocks`."""
    found = []
    for _ in worker.tp_mappings[engine_id].all_source_ranks:
        for engine, table, ratio in ((engine_id, source, None), (LOCAL, target, 1)):
            found.append(
                worker._compute_desc_ids(
                    block_ids=[table],
                    dst_num_blocks=worker.dst_num_blocks[engine],
                    block_size_ratio=ratio,
                    physical_blocks_per_logical=1,
                    region_num_blocks=worker.dst_region_num_blocks[engine],
                    region_group_ids=worker.region_group_ids,
                    uses_region_group_mapping=False,
                )
            )
    return found


def _identity(rank: Rank, nixl: NoNixl) -> dict[str, Any]:
    spec = FullAttentionSpec(
        block_size=rank.block_tokens, num_kv_heads=rank.num_heads, head_size=rank.head_dim, dtype=torch.bfloat16
    )
    names = [f"layers.{index}" for index in range(len(rank.region_addresses))]
    return {
        "engine_id": LOCAL,
        "tp_rank": 0,
        "world_size": rank.tensor_parallel,
        "pcp_size": 1,
        "dcp_size": 1,
        "dcp_rank": 0,
        "pp_size": 1,
        "use_mla": False,
        "use_host_buffer": False,
        "backend_name": "FLASH_ATTN",
        "kv_cache_layout": LAYOUT,
        "device_id": 0,
        "nixl_memory_type": "VRAM",
        "nixl_wrapper": nixl,
        "block_size": rank.block_tokens,
        "num_blocks": rank.num_blocks,
        "kv_cache_config": KVCacheConfig(rank.num_blocks, [], [KVCacheGroupSpec(names, spec)]),
        "_group_spec_types": (FullAttentionSpec,),
        "_logical_num_blocks": rank.num_blocks,
        "_physical_blocks_per_logical_kv_block": 1,
        "_has_mamba": False,
        "_is_hma_required": False,
        "_is_csa_linear": False,
        "_ple_region_index": None,
        "_bidirectional_kv_xfer_enabled": False,
    }


def _regions(rank: Rank) -> dict[str, Any]:
    num_regions = len(rank.region_addresses)
    return {
        "num_regions": num_regions,
        "num_descs": num_regions * rank.num_blocks,
        "block_len_per_layer": [rank.block_bytes] * num_regions,
        "block_stride_per_layer": [rank.block_bytes] * num_regions,
        "region_num_blocks": [rank.num_blocks] * num_regions,
        "region_group_ids": [0] * num_regions,
        "region_names": [f"layers.{index}" for index in range(num_regions)],
        "region_mem_types": ["VRAM"] * num_regions,
        "_region_is_mla": [False] * num_regions,
        "_uses_region_group_mapping": False,
        "_mixed_mem_types": False,
        "_ssm_region_indices": [],
        "_scratch_region_indices": [],
        "_transfer_layer_names": (),
        "_transfer_layer_region_indices": (),
        "_transfer_layer_group_ids": (),
    }


def _empty_tables() -> dict[str, Any]:
    return {
        "_remote_agents": defaultdict(dict),
        "_invalid_remote_engines": set(),
        "_engine_last_active": {},
        "_recving_transfers": defaultdict(list),
        "kv_caches_base_addr": defaultdict(dict),
        "src_xfer_handles_by_block_size": {},
        "src_xfer_handles_by_tp_ratio": {},
        "dst_xfer_side_handles": defaultdict(dict),
        "dst_num_blocks": {},
        "dst_region_num_blocks": {},
        "dst_region_group_ids": {},
        "dst_uses_region_group_mapping": {},
        "dst_region_mem_types": {},
        "tp_mappings": {},
    }


def _metadata(rank: Rank, engine_id: str) -> NixlAgentMetadata:
    regions = _regions(rank)
    return NixlAgentMetadata(
        engine_id=engine_id,
        agent_metadata=engine_id.encode(),
        kv_caches_base_addr=list(rank.region_addresses),
        device_id=0,
        num_blocks=rank.num_blocks,
        block_lens=regions["block_len_per_layer"],
        block_strides=regions["block_stride_per_layer"],
        kv_cache_layout=LAYOUT,
        block_size=rank.block_tokens,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=regions["region_num_blocks"],
        region_group_ids=regions["region_group_ids"],
        region_names=regions["region_names"],
        region_mem_types=regions["region_mem_types"],
    )
