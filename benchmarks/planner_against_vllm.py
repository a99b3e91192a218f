"""The planner next to vLLM's own functions, for the same ranks, the same addresses and the same block ids.

Import this only where vLLM is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import vllm_nixl
from measuring import Work, allocated
from planner_cases import BLOCK_TOKENS, HEAD_DIM, ITEM_BYTES, NUM_HEADS, Case, block_ids, engines

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.copies import Copies

__all__ = ["Peer", "RequestAgainstVllm", "memory_per_peer"]

DESCRIPTOR_BYTES = 24
"""An address, a length and a device number, as vLLM lays them out for NIXL."""

MAX_SPLIT_DESCRIPTORS = 2_000_000
"""vLLM makes its split lists of Python tuples, some 200 bytes for each of these: more would not fit everywhere."""


logging.getLogger("vllm").setLevel(logging.WARNING)


def vllm_rank(layout: Layout, tensor_parallel: int) -> vllm_nixl.Rank:
    """The same memory as a layout of ours in the packed format, in vLLM's terms."""
    num_heads = NUM_HEADS // tensor_parallel
    return vllm_nixl.Rank(
        tensor_parallel=tensor_parallel,
        region_addresses=tuple(region.address for region in layout.regions),
        num_blocks=layout.groups[0].num_blocks,
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_TOKENS * num_heads * 2 * HEAD_DIM * ITEM_BYTES,
        num_heads=num_heads,
        head_dim=HEAD_DIM,
    )


@dataclass(slots=True)
class Peer:
    """A decode worker of vLLM, and prefill engines of one shape that it meets one after the other."""

    case: Case
    sources: dict[int, vllm_nixl.Rank]
    target: vllm_nixl.Rank
    nixl: vllm_nixl.NoNixl
    worker: Any
    numbers: Iterator[int]

    @classmethod
    def of(cls, case: Case, num_blocks: int, *, keeps_lists: bool) -> Peer:
        source, target = engines(case, num_blocks)
        each = case.source_tensor_parallel // case.target_tensor_parallel
        sources = {number: vllm_rank(source[number], case.source_tensor_parallel) for number in range(each)}
        rank, nixl = vllm_rank(target[0], case.target_tensor_parallel), vllm_nixl.NoNixl(keeps_lists)
        return cls(case, sources, rank, nixl, vllm_nixl.local_worker(rank, NUM_HEADS, nixl), count())

    @property
    def has_splits(self) -> bool:
        return vllm_nixl.needs_splits(self.worker, self.case.source_tensor_parallel)

    @property
    def num_split_descriptors(self) -> int:
        lists = len(self.sources) if self.has_splits else 0
        return lists * len(self.target.region_addresses) * self.target.num_blocks

    def local_list(self) -> None:
        self.worker.register_local_xfer_handler(BLOCK_TOKENS)

    def first(self) -> str:
        """Meet a peer of a shape not seen before."""
        self.worker.src_xfer_handles_by_tp_ratio.clear()
        return self._meet()

    def next(self) -> str:
        """Meet another peer of a shape seen before."""
        if self.has_splits:
            vllm_nixl.skip_splits(self.worker, self.case.source_tensor_parallel)
        return self._meet()

    def _meet(self) -> str:
        engine_id = f"peer {next(self.numbers)}"
        vllm_nixl.meet(self.worker, engine_id, self.sources)
        return engine_id

    def work(self) -> dict[str, Work]:
        """What vLLM does per worker and per peer."""
        work: dict[str, Work] = {"vllm_local_list": self.local_list, "vllm_next_peer": self.next}
        return work | ({} if self.skipped_splits else {"vllm_first_peer": self.first})

    @property
    def skipped_splits(self) -> dict[str, Any]:
        """Why a first peer is not tried; empty when it is."""
        if self.num_split_descriptors <= MAX_SPLIT_DESCRIPTORS:
            return {}
        return {
            "skipped": f"{self.num_split_descriptors:,} descriptors as Python tuples: in proportion to a small pool"
        }


@dataclass(slots=True)
class RequestAgainstVllm:
    """One request of a case on both sides, each having met its peer."""

    peer: Peer
    engine_id: str
    source: list[int]
    target: list[int]
    lists: list[np.ndarray]

    @classmethod
    def of(cls, case: Case, num_blocks: int, run: int) -> RequestAgainstVllm:
        peer = Peer.of(case, num_blocks, keeps_lists=True)
        engine_id = peer.first()
        lists = [np.asarray(descriptors, np.uint64) for descriptors in peer.nixl.lists]
        return cls(peer, engine_id, block_ids(run, num_blocks, 1), block_ids(run, num_blocks, 2), lists)

    def read(self) -> list[tuple[int, np.ndarray, int, np.ndarray]]:
        vllm_nixl.read(self.peer.worker, self.engine_id, self.source, self.target)
        return self.peer.nixl.posted

    def looked_up(self) -> list[np.ndarray]:
        """Source, target and length of every descriptor: the columns that `copies_for` returns."""
        found = [
            (self.lists[remote][remote_ids, 0], self.lists[local][local_ids, 0], self.lists[local][local_ids, 1])
            for local, local_ids, remote, remote_ids in self.read()
        ]
        return [np.concatenate(column) for column in zip(*found, strict=True)]

    def work(self) -> dict[str, Work]:
        return {
            "vllm_desc_ids": lambda: vllm_nixl.descriptor_ids(
                self.peer.worker, self.engine_id, self.source, self.target
            ),
            "vllm_read_blocks": self.read,
            "vllm_ids_looked_up": self.looked_up,
        }

    def shape(self) -> dict[str, Any]:
        """How much vLLM computes, and how many of its descriptors have the ids next to their predecessor's."""
        posted = self.read()
        num_descriptors = sum(len(ids) for _, ids, _, _ in posted)
        adjacent = sum(
            int(((np.diff(local_ids) == 1) & (np.diff(remote_ids) == 1)).sum())
            for _, local_ids, _, remote_ids in posted
        )
        return {
            "vllm_descriptors": num_descriptors,
            "vllm_bytes": sum(local.nbytes + remote.nbytes for _, local, _, remote in posted),
            "vllm_adjacent_ids": round(adjacent / num_descriptors, 4),
        }

    def moves_the_same(self, ours: list[Copies]) -> bool:
        """Whether both move the same bytes: row by row, or in all when ours are merged."""
        theirs = self.looked_up()
        columns = [np.concatenate(parts) for parts in zip(*((c.source, c.target, c.length) for c in ours), strict=True)]
        if len(columns[0]) != len(theirs[0]):
            return int(columns[2].sum()) == int(theirs[2].sum())
        orders = np.argsort(columns[1]), np.argsort(theirs[1])
        return all(np.array_equal(a[orders[0]], b[orders[1]]) for a, b in zip(columns, theirs, strict=True))


def memory_per_peer(case: Case, num_blocks: int) -> dict[str, Any]:
    """The lists that vLLM hands to NIXL, which keeps them, and what Python holds at most while they are made."""
    peer = Peer.of(case, num_blocks, keeps_lists=False)
    return {
        "vllm_local_list": _handed_over(peer, peer.local_list),
        "vllm_next_peer": _handed_over(peer, peer.next),
        "vllm_first_peer": peer.skipped_splits or _handed_over(peer, peer.first),
    }


def _handed_over(peer: Peer, work: Work) -> dict[str, int]:
    before = peer.nixl.num_descriptors
    peak_bytes = allocated(work).peak_bytes
    descriptors = peer.nixl.num_descriptors - before
    return {
        "descriptors": descriptors,
        "handed_over_bytes": descriptors * DESCRIPTOR_BYTES,
        "peak_bytes": peak_bytes,
    }
