"""What the tests of two agents share: one cache in two layouts, its lease, checks of what arrived, and a gate."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from engines import oracle
from faulty_transport import GatedTransport
from unmapping import wait_for_unmapping

from kvferry import new_lease_id
from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.events import LeaseRequest
from kvferry.staging.host_mover import HostMover, host_regions

SOURCE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TARGET = EngineShape(1, 1, block_tokens=6, num_blocks=9, format="block-head-major")
SOURCE_TABLES, TARGET_TABLES = ((3, 9, 1, 15, 0, 7),), ((8, 0, 5, 2),)
NUM_TOKENS = 21
ITEM_BYTES = 4
# Keys and values of two layers with four heads of eight elements: see MODEL in conftest.py.
BYTES_PER_TOKEN = 2 * 2 * 4 * 8 * ITEM_BYTES
DEADLINE_S = 30.0


def leased(source, request_id="r1", lease_id=""):
    """The reference to a cache that the source has."""
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    return source.agent.lease(LeaseRequest(request_id, lease_id or new_lease_id(), SOURCE_TABLES, NUM_TOKENS))


def check(target, num_tokens=NUM_TOKENS, tables=TARGET_TABLES):
    """Every requested element is right and nothing else was touched."""
    wanted = {start: np.zeros(len(buffer), np.uint8) for start, buffer in target.memory.buffers.items()}
    layout, tokens = target.memory.layout, TokenRange(0, num_tokens)
    for placement in layout.placements:
        for _, _, address in oracle.element_addresses(layout, placement, tables, tokens):
            start = layout.regions[placement.region].address
            wanted[start][address - start : address - start + ITEM_BYTES] = 1
    oracle.expect(target.memory, tables, [tokens], wanted)


class WireOnly(HostMover):
    """Has what it gathers written over the transport, on one host as well."""

    reaches_peer_memory = False


def wire_only(memories, notify):
    """What makes such a mover."""
    return WireOnly(host_regions(memories), notify)


def num_mappings(memory):
    """How often this process has mapped shared memory."""
    wait_for_unmapping()
    inode = str(os.fstat(memory.shared_fd).st_ino)
    return [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()].count(inode)


class Gate:
    """While it is shut, nothing moves that has been posted to a transport behind it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._posts = threading.Semaphore(0)

    def shut(self) -> None:
        """From now on `wait_for_post` counts what is posted."""
        self._path.touch()
        while self._posts.acquire(blocking=False):
            pass

    def open(self) -> None:
        self._path.unlink()

    def wait_for_post(self) -> None:
        assert self._posts.acquire(timeout=DEADLINE_S)

    def behind(self, transport) -> GatedTransport:
        """The transport as its user sees it: what `make_rank` wraps it with."""
        return _Telling(transport, self._path.exists, self._posts)


class _Telling(GatedTransport):
    def __init__(self, inner, is_shut, posts) -> None:
        super().__init__(inner, is_shut)
        self._posts = posts

    def post(self, peer, copies, direction):
        ticket = super().post(peer, copies, direction)
        self._posts.release()
        return ticket
