"""Memory that peers know the address of: it goes when nobody can write to it any more, and else stays in the way."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from agent_support import MODEL, SOURCE, TARGET, moved, sizes, wire_only

from kvferry import Agent, AgentConfig, Cache
from kvferry.agent.config import SLOT_BYTES
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import describe
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import FetchFailed
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.transport.base import Memory
from kvferry.transport.cma.transport import CrossMemoryTransport
from kvferry.transport.registry import open_transports
from kvferry.transport.selection.probe import allocation_bytes
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared

NUM_BYTES = 1 << 16
PACK = StagingPolicy((Strategy.PACK,), 1 << 12)
STAGING, PROBE = 4 * SLOT_BYTES, allocation_bytes()


def is_mapped(name):
    return name in Path("/proc/self/maps").read_text()


# --- one piece of memory ---


def test_memory_that_nobody_writes_to_is_unmapped(kept):
    lent = allocate_shared(NUM_BYTES, "lent-and-free")
    assert is_mapped("lent-and-free")
    lent.close(may_be_written=False)
    assert not is_mapped("lent-and-free")
    assert kept == []


def test_a_late_write_lands_where_nothing_else_can_be(kept):
    lent, owner, peer = allocate_shared(NUM_BYTES, "lent-and-kept"), CrossMemoryTransport(), CrossMemoryTransport()
    lent.buffer[:] = b"\xaa" * NUM_BYTES
    late = np.arange(1, 101, dtype=np.uint8)
    owner.register(lent.memory)
    peer.register(Memory(int(late.ctypes.data), late.size, -1))
    peer.connect("owner", owner.descriptor())
    row = (np.array([number], np.uint64) for number in (late.ctypes.data, lent.memory.address + 5000, late.size))
    ticket = peer.post("owner", Copies(*row, pieces=1), Direction.WRITE)
    owner.close()
    lent.close(may_be_written=True)
    del lent
    assert is_mapped("lent-and-kept")
    (completion,) = peer.poll()
    assert (completion.ticket, completion.error) == (ticket, "")
    (memory,) = kept
    # What was there is gone, and so are the pages; those that are written to come back one by one.
    there = np.frombuffer(memory.buffer, np.uint8)
    assert (there[5000:5100] == late).all()
    assert np.count_nonzero(there) == late.size
    peer.close()


def test_the_first_word_counts(kept):
    free, in_use = allocate_shared(NUM_BYTES, "lent-free-first"), allocate_shared(NUM_BYTES, "lent-kept-first")
    for may_be_written in (False, True):
        free.close(may_be_written)
        in_use.close(not may_be_written)
    assert len(kept) == 1
    assert not is_mapped("lent-free-first")
    assert is_mapped("lent-kept-first")


def test_nobody_can_attach_memory_that_is_kept(kept):
    lent = allocate_shared(NUM_BYTES, "lent-not-attached")
    lent.close(may_be_written=True)
    assert lent.memory.shared_fd == -1


def test_where_the_kernel_cannot_take_pages_back_the_memory_stays_as_it_is(kept):
    class Sandboxed(mmap.mmap):
        def madvise(self, option, *extent):
            raise OSError("no such advice")

    fd = os.memfd_create("lent-in-a-sandbox")
    os.truncate(fd, NUM_BYTES)
    shared = SharedMemory(Memory(0, NUM_BYTES, fd), Sandboxed(fd, NUM_BYTES))
    shared.buffer[0] = 7
    shared.close(may_be_written=True)
    shared.close()
    assert shared.buffer[0] == 7


# --- what an agent has lent, at its end ---


def test_an_agent_that_nobody_has_met_keeps_nothing(kept, make_rank):
    make_rank("p0", SOURCE).agent.close()
    assert kept == []


@pytest.mark.parametrize("strategy", [Strategy.DIRECT, Strategy.SCATTER])
def test_agents_whose_transfers_are_over_keep_nothing(kept, make_rank, strategy):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, staging=StagingPolicy((strategy,), 1 << 12))
    moved(source, target)
    for rank in (source, target):
        rank.agent.close()
    assert kept == []


def test_slots_that_a_source_may_still_write_to_stay_in_place(kept, make_rank, gate):
    source = make_rank("p0", SOURCE, wrap=gate.behind, mover=wire_only)
    target = make_rank("d0", TARGET, staging=PACK, staging_bytes=STAGING)
    moved(source, target, 0)
    gate.hold(source, target)
    target.agent.close()
    assert STAGING in sizes(kept)
    gate.open()


def test_the_probe_stays_in_place_while_a_target_may_test(kept, make_rank, gate):
    source, target = make_rank("p0", SOURCE, "cma"), make_rank("d0", TARGET, "cma", wrap=gate.behind)
    gate.hold(source, target)
    source.agent.close()
    assert sizes(kept) == [PROBE]
    gate.open()
    target.next_notice(FetchFailed)


def test_the_probe_stays_in_place_while_a_source_may_test(kept, make_rank, gate):
    source = make_rank("p0", SOURCE, "cma", wrap=gate.behind)
    target = make_rank("d0", TARGET, "cma", direction=Direction.WRITE)
    gate.hold(source, target)
    target.agent.close()
    assert sizes(kept) == [PROBE]
    gate.open()


# --- what copies to and from it ---


def is_taken(memory):
    """Whether these addresses belong to a mapping of this process."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= memory.address < int(stop, 16) for start, stop in ranges)


class Watched:
    """A mover that writes down whether its memories are still there when it is closed."""

    busy, notifies = False, True

    reaches_peer_memory = False

    def __init__(self, memories):
        self.arena = memories[-1]
        self.was_there = []

    def poll(self):
        return []

    def close(self):
        self.was_there.append(is_taken(self.arena))


@pytest.mark.parametrize("is_started", [True, False])
def test_the_mover_ends_before_the_memory_does(is_started):
    movers = []

    def mover(memories, _notify):
        movers.append(Watched(memories))
        return movers[-1]

    (layout,) = describe(MODEL, SOURCE, 1 << 20)
    cache, opened = Cache((layout,), (), mover), open_transports("tcp")
    agent = Agent(AgentConfig("p0", transport="tcp"), cache, print, opened.transports, opened.unavailable)
    (watched,) = movers
    if is_started:
        agent.start()
    assert is_taken(watched.arena)
    agent.close()
    assert all(watched.was_there)
    assert watched.was_there
    assert not is_taken(watched.arena)


def test_a_mover_is_closed_when_the_agent_comes_to_nothing():
    movers = []

    def mover(memories, _notify):
        movers.append(Watched(memories))
        return movers[-1]

    # A part of the regions can be registered, and the others cannot: that is seen after the mover was made.
    (layout,) = describe(MODEL, SOURCE, 1 << 20)
    region = layout.regions[0]
    cache = Cache((layout,), (Memory(region.address, region.size_bytes, -1),), mover)
    opened = open_transports("tcp")
    with pytest.raises(ConfigurationError, match="others cannot"):
        Agent(AgentConfig("p0", transport="tcp"), cache, print, opened.transports, opened.unavailable)
    assert movers[0].was_there[0]
