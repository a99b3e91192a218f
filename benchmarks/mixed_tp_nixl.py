"""NIXL as the peers use it: lists of descriptors that are prepared once, and one transfer that names all of them."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np

from kvferry.plan.programs.copies import Copies, Direction
from kvferry.transport.memory_kind import kind_of
from kvferry.transport.ucx.environment import PACKAGES, prepare

__all__ = ["PROGRESS_S", "PlainNixl", "Prepared"]

PROGRESS_S = 0.0005
"""So often NIXL makes progress for peers on its host while something is waited for. For those on others it has a core
meanwhile, like a progress thread: over sockets every piece of a read is its work."""
TRANSFER_S = 60.0


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """NIXL's kind of memory on both sides, and the devices that it belongs to."""

    kind: str = "DRAM"
    device_id: int = 0
    peers_device_id: int = 0


class Prepared:
    """The rows of one peer as two prepared lists."""

    def __init__(self, agent: Any, peer: str, copies: Copies, direction: Direction, memory: NixlMemory) -> None:
        near, far = (copies.target, copies.source) if direction is Direction.READ else (copies.source, copies.target)
        self.operation = direction.name
        self._agent = agent
        self.sides = [
            agent.prep_xfer_dlist(name, _rows(address, copies.length, device_id), memory.kind)
            for name, address, device_id in (("", near, memory.device_id), (peer, far, memory.peers_device_id))
        ]
        self.indices = np.arange(len(copies), dtype=np.int32)

    def post(self) -> tuple[Any, str]:
        """Begin to move all of them."""
        near, far = self.sides
        handle = self._agent.make_prepped_xfer(self.operation, near, self.indices, far, self.indices)
        return handle, self._agent.transfer(handle)

    def release(self) -> None:
        for side in self.sides:
            self._agent.release_dlist_handle(side)


class PlainNixl:
    """One agent with the settings of our own transport, UCX's too: no progress thread, no threads that copy."""

    def __init__(self, extents: Sequence[tuple[int, int]], device: str = "cpu", device_id: int = 0) -> None:
        kind = kind_of(device)
        prepare(device, device)
        self._memory = NixlMemory(kind, device_id)
        api = next(_importable())
        # It prints its own progress to the standard output otherwise.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.name = f"bench-{uuid4().hex}"
        config = api.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"], num_threads=0
        )
        self.agent = api.nixl_agent(self.name, config)
        for address, num_bytes in extents:
            self.agent.register_memory([(address, num_bytes, device_id, "")], kind)

    def metadata(self) -> bytes:
        return bytes(self.agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        loaded = self.agent.add_remote_agent(metadata)
        return loaded.decode() if isinstance(loaded, bytes) else str(loaded)

    def progress(self) -> None:
        self.agent.get_new_notifs()

    def prepare(self, peer: str, copies: Copies, direction: Direction, peers_device_id: int = 0) -> Prepared:
        memory = replace(self._memory, peers_device_id=peers_device_id)
        return Prepared(self.agent, peer, copies, direction, memory)

    def run(self, work: Sequence[Prepared]) -> float:
        """Post everything, wait for the end of everything; seconds."""
        began = time.perf_counter()
        posted = [each.post() for each in work]
        for handle, state in posted:
            while state == "PROC" and time.perf_counter() < began + TRANSFER_S:
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL: {state}")
        elapsed = time.perf_counter() - began
        for handle, _ in posted:
            self.agent.release_xfer_handle(handle)
        return elapsed


def _importable() -> Any:
    for package in PACKAGES:
        try:
            yield importlib.import_module(f"{package}._api")
        except ImportError:
            continue


def _rows(address: np.ndarray, length: np.ndarray, device_id: int) -> np.ndarray:
    return np.ascontiguousarray(np.stack([address, length, np.full_like(length, device_id)], axis=1))
