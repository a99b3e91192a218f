"""What the tests of two agents share: one cache in two layouts, its lease, checks of what arrived, and a gate."""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import oracle
from faulty_transport import GatedTransport
from unmapping import wait_for_unmapping

from kvferry import Agent, new_lease_id
from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import Fetched, FetchReport, LeaseEnded
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.session.timing import Timing
from kvferry.staging.host_mover import HostMover, host_regions

MODEL = attention(num_layers=2, num_heads=4, head_dim=8, dtype="float32", item_bytes=4)
SOURCE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TARGET = EngineShape(1, 1, block_tokens=6, num_blocks=9, format="block-head-major")
SOURCE_TABLES, TARGET_TABLES = ((3, 9, 1, 15, 0, 7),), ((8, 0, 5, 2),)
NUM_TOKENS = 21
# Generous where nothing is waited for, so that a busy machine is not taken for a lost peer.
TIMING = Timing(lease_s=60.0, heartbeat_s=2.0, resend_s=0.5, handshake_s=25.0, transfer_s=20.0)
BYTES_PER_TOKEN = MODEL.bytes_per_token
DEADLINE_S = 30.0
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="the nixl extra is not installed")
)


@dataclass
class Rank:
    """A real agent over a cache that no engine computes: the oracle fills and checks it."""

    agent: Agent
    memory: oracle.Memory
    notices: queue.SimpleQueue

    def next_notice(self, kind):
        """The next notice, which must be of this kind."""
        notice = self.notices.get(timeout=DEADLINE_S)
        assert isinstance(notice, kind), notice
        return notice

    def wanted(self, source: Rank, reference, tables, num_tokens, request_id="q1") -> FetchRequest:
        return FetchRequest(request_id, reference, (source.agent.address,), tables, (TokenRange(0, num_tokens),))

    def fetch(self, source: Rank, reference, request_id="q1", tables=TARGET_TABLES) -> None:
        self.agent.fetch(self.wanted(source, reference, tables, NUM_TOKENS, request_id))


def leased(source, request_id="r1", lease_id=""):
    """The reference to a cache that the source has."""
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    return source.agent.lease(LeaseRequest(request_id, lease_id or new_lease_id(), SOURCE_TABLES, NUM_TOKENS))


def check(target, num_tokens=NUM_TOKENS, tables=TARGET_TABLES):
    """Every requested element is right and nothing else was touched."""
    oracle.expect_tokens(target.memory, tables, num_tokens)


def moved(source, target, number=1, tables=TARGET_TABLES) -> FetchReport:
    """What is reported of a request whose cache goes from the source to the target, and arrives."""
    target.fetch(source, leased(source, f"r{number}"), f"q{number}", tables)
    report = target.next_notice(Fetched).report
    check(target, tables=tables)
    assert source.next_notice(LeaseEnded) == LeaseEnded(f"r{number}", "done")
    return report


def fetch_from_all(sources, targets, number=1, tables=TARGET_TABLES) -> None:
    """All ranks of one engine, or of several, fetch what all ranks of another one have computed of a request."""
    lease_id, addresses = new_lease_id(), tuple(source.agent.address for source in sources)
    reference, *_ = [leased(source, f"r{number}", lease_id) for source in sources]
    for target in targets:
        target.agent.fetch(FetchRequest(f"q{number}", reference, addresses, tables, (TokenRange(0, NUM_TOKENS),)))


def moved_between_all(sources, targets, tables=TARGET_TABLES) -> list[FetchReport]:
    """What each target rank reports of that."""
    fetch_from_all(sources, targets, tables=tables)
    reports = [target.next_notice(Fetched).report for target in targets]
    for target in targets:
        check(target, tables=tables)
    assert [source.next_notice(LeaseEnded) for source in sources] == [LeaseEnded("r1", "done")] * len(sources)
    return reports


def sizes(memories):
    """Of shared memory that is kept."""
    return sorted(memory.memory.size_bytes for memory in memories)


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


def until(is_so):
    """Wait for what another thread does."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def until_slots_are_free(*ranks):
    """A target that has given up keeps the slots that a source packs into until this one says that it writes no more,
    which may come after all notices."""
    until(lambda: not any(rank.agent.num_slots for rank in ranks))


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

    def hold(self, source, target) -> None:
        """Of a source and a target that have met: a transfer of the request q1 has been posted, and does not move."""
        self.shut()
        target.fetch(source, leased(source))
        self.wait_for_post()

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
