"""The staging memory of an agent: who is to be asked for the end of a copy, and when a slot is there."""

import ctypes
from pathlib import Path

import pytest
from agent_support import num_mappings

from kvferry.agent.config import slot_bytes_in
from kvferry.agent.memory.peer_slots import FarSlots
from kvferry.agent.memory.stager import Stager
from kvferry.session.commands import Acquire
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey, SlotKey
from kvferry.staging.mover import Moved
from kvferry.testing.transports.world import wait_for_unmapping
from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.messages import MAX_SLOT_BYTES, Party

ARENA = Memory(1 << 20, 1 << 16, -1)
KEY = SlotKey(ReadKey("q1", PeerKey("p0", "e1", "tcp://127.0.0.1:1")), 0, 0)


class Copying:
    """A mover that is done with what a test says."""

    busy = True
    reaches_far = True

    def __init__(self, rings):
        self.rings = rings
        self.ended = []

    def start(self, key, tiles, far=None):
        raise AssertionError

    def poll(self):
        return [self.ended.pop()] if self.ended else []

    def close(self):
        pass


@pytest.mark.parametrize("rings", [True, False])
def test_only_a_mover_that_does_not_ring_has_to_be_asked_again_and_again(rings):
    stager = Stager(ARENA, Copying(rings), FarSlots(ARENA))
    assert stager.busy is not rings
    stager.close()


def test_a_wish_for_a_slot_is_answered_by_the_next_poll():
    stager = Stager(ARENA, Copying(rings=True), FarSlots(ARENA))
    stager.acquire(Acquire(KEY, 4096))
    assert stager.is_changed
    assert stager.poll() == [Acquired(KEY, ARENA.address)]
    assert not stager.is_changed
    stager.release(KEY)
    assert stager.is_changed
    assert stager.poll() == []
    stager.close()


def test_a_slot_of_the_target_that_can_be_reached_is_as_good_as_an_own_one():
    """It stays mapped until it is given back, also when its target is gone, and no longer."""
    theirs = allocate_shared(1 << 16, "target")
    assert num_mappings(theirs.memory) == 1
    far, party = FarSlots(ARENA), Party("d0", "epoch-9", 0)
    far.attach(party, FarSlots(theirs.memory).descriptor)
    stager = Stager(ARENA, Copying(rings=True), far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    stager.acquire(Acquire(key, 4096, theirs.memory.address + 8192))
    (acquired,) = stager.poll()
    assert acquired == Acquired(key, acquired.address, is_far=True)
    assert stager.num_slots == 1
    far.detach(party)
    ctypes.memset(acquired.address, 7, 4096)
    assert set(theirs.buffer[8192:12288]) == {7}
    assert not any(theirs.buffer[12288:])
    assert num_mappings(theirs.memory) == 2
    stager.release(key)
    assert num_mappings(theirs.memory) == 1
    assert stager.num_slots == 0
    assert stager.poll() == []
    theirs.close()
    stager.close()


@pytest.mark.parametrize("end", ["the stager's", "the target's"])
def test_slots_of_targets_are_unmapped_at_the_end(end):
    theirs, far = allocate_shared(1 << 16, "target"), FarSlots(ARENA)
    party = Party("d0", "epoch-9", 0)
    far.attach(party, FarSlots(theirs.memory).descriptor)
    stager = Stager(ARENA, Copying(rings=True), far)
    assert num_mapped("target") == 2
    if end == "the stager's":
        stager.acquire(Acquire(SlotKey(ClaimKey("l1", party, "q1"), 0, 0), 4096, theirs.memory.address))
        stager.close()
        far.close()
    else:
        theirs.close()
        stager.poll()
    assert num_mapped("target") == (1 if end == "the stager's" else 0)
    theirs.close()
    stager.close()
    far.close()


def num_mapped(name):
    """Mappings of shared memory by its name: its file may be closed already."""
    wait_for_unmapping()
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_slots_of_targets_take_turns_like_our_own():
    """As many at once as would have room in our own memory, which they do not need; larger ones one by one."""
    far = FarSlots(ARENA)
    owners = {name: allocate_shared(1 << 20, name) for name in ("greedy", "modest")}
    parties = {name: Party(name, "epoch-9", 0) for name in owners}
    for name, memory in owners.items():
        far.attach(parties[name], FarSlots(memory.memory).descriptor)
    stager = Stager(ARENA, Copying(rings=True), far)

    def ask(name, number, num_bytes=1 << 14):
        key = SlotKey(ClaimKey("l1", parties[name], "q1"), 0, number)
        stager.acquire(Acquire(key, num_bytes, owners[name].memory.address))
        return key

    greedy, modest = [ask("greedy", number) for number in range(3)], ask("modest", 0)
    assert [event.key for event in stager.poll()] == [greedy[0], modest]
    assert stager.num_slots == 4
    stager.release(modest)
    assert [event.key for event in stager.poll()] == [greedy[1]]
    large = ask("modest", 1, 1 << 19)
    stager.release(greedy[2])
    stager.release(greedy[0])
    assert stager.poll() == []
    stager.release(greedy[1])
    (acquired,) = stager.poll()
    assert acquired == Acquired(large, acquired.address, is_far=True)
    ctypes.memset(acquired.address, 7, 1 << 19)
    stager.release(large)
    for memory in owners.values():
        memory.close()
    stager.close()


def test_only_what_was_gathered_to_the_end_is_counted():
    theirs = allocate_shared(1 << 16, "target")
    far, party = FarSlots(ARENA), Party("d0", "epoch-9", 0)
    far.attach(party, FarSlots(theirs.memory).descriptor)
    mover = Copying(rings=True)
    stager = Stager(ARENA, mover, far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    for error, counted in (("broken", 0), ("", 4096), ("", 8192)):
        stager.acquire(Acquire(key, 4096, theirs.memory.address))
        stager.poll()
        mover.ended = [Moved(key, error)]
        assert stager.poll() == [Staged(key, error)]
        assert stager.gathered_bytes == counted
        stager.release(key)
    theirs.close()
    stager.close()


@pytest.mark.parametrize("why", ["never attached", "outside", "no such memory", "for a scatter"])
def test_where_the_targets_slot_cannot_be_reached_there_is_one_of_ours(why):
    theirs = allocate_shared(1 << 16, "target")
    far, party = FarSlots(ARENA), Party("d0", "epoch-9", 0)
    if why == "no such memory":
        far.attach(party, b"nonsense")
    elif why != "never attached":
        far.attach(party, FarSlots(theirs.memory).descriptor)
    stager = Stager(ARENA, Copying(rings=True), far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    address = {"outside": theirs.memory.address + (1 << 16) - 4095, "for a scatter": 0}.get(why, theirs.memory.address)
    stager.acquire(Acquire(key, 4096, address))
    assert stager.poll() == [Acquired(key, ARENA.address + ARENA.size_bytes // 2)]
    theirs.close()
    stager.close()


def test_of_memory_that_nobody_can_attach_nobody_is_told():
    assert FarSlots(ARENA).descriptor == b""


def test_slots_fit_into_staging_memory_and_into_an_offer():
    """Eight each way, but no less than one page, and no more than the wire can say."""
    assert [slot_bytes_in(size) for size in (1 << 14, 256 << 20, 1 << 40)] == [4096, 16 << 20, MAX_SLOT_BYTES]
