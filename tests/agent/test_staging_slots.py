"""The staging memory of an agent: who is to be asked for the end of a copy, and when a slot is there."""

import ctypes
from pathlib import Path

import pytest
from agent_support import num_mappings
from unmapping import wait_for_unmapping

from kvferry.agent.config import slot_bytes_in
from kvferry.agent.memory.peer_slots import PeerSlots
from kvferry.agent.memory.staging_slots import StagingSlots
from kvferry.session.commands import Acquire
from kvferry.session.events import Acquired, Staged
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey, SlotKey
from kvferry.staging.mover import Moved
from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import allocate_shared
from kvferry.wire.messages import MAX_SLOT_BYTES, Party

ARENA = Memory(1 << 20, 1 << 16, -1)
KEY = SlotKey(ReadKey("q1", PeerKey("p0", "e1", "tcp://127.0.0.1:1")), 0, 0)


class Copying:
    """A mover that is done with what a test says."""

    busy = True
    reaches_peer_memory = True

    def __init__(self, notifies):
        self.notifies = notifies
        self.ended = []

    def start(self, key, tiles, far=None):
        raise AssertionError

    def poll(self):
        return [self.ended.pop()] if self.ended else []

    def close(self):
        pass


@pytest.mark.parametrize("notifies", [True, False])
def test_only_a_mover_that_does_not_ring_has_to_be_asked_again_and_again(notifies):
    staging = StagingSlots(ARENA, Copying(notifies), PeerSlots(ARENA))
    assert staging.busy is not notifies
    staging.close()


def test_a_wish_for_a_slot_is_answered_by_the_next_poll():
    staging = StagingSlots(ARENA, Copying(notifies=True), PeerSlots(ARENA))
    staging.acquire(Acquire(KEY, 4096))
    assert staging.is_changed
    assert staging.poll() == [Acquired(KEY, ARENA.address)]
    assert not staging.is_changed
    staging.release(KEY)
    assert staging.is_changed
    assert staging.poll() == []
    staging.close()


def test_a_slot_of_the_target_that_can_be_reached_is_as_good_as_an_own_one():
    """It stays mapped until it is given back, also when its target is gone, and no longer."""
    theirs = allocate_shared(1 << 16, "target")
    assert num_mappings(theirs.memory) == 1
    far, party = PeerSlots(ARENA), Party("d0", "epoch-9", 0)
    far.attach(party, PeerSlots(theirs.memory).descriptor)
    staging = StagingSlots(ARENA, Copying(notifies=True), far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    staging.acquire(Acquire(key, 4096, theirs.memory.address + 8192))
    (acquired,) = staging.poll()
    assert acquired == Acquired(key, acquired.address, is_peer_slot=True)
    assert staging.num_slots == 1
    far.detach(party)
    ctypes.memset(acquired.address, 7, 4096)
    assert set(theirs.buffer[8192:12288]) == {7}
    assert not any(theirs.buffer[12288:])
    assert num_mappings(theirs.memory) == 2
    staging.release(key)
    assert num_mappings(theirs.memory) == 1
    assert staging.num_slots == 0
    assert staging.poll() == []
    theirs.close()
    staging.close()


def test_a_target_whose_slots_cannot_be_attached_any_more_is_not_said_to_be_reached():
    theirs, far = allocate_shared(1 << 16, "target"), PeerSlots(ARENA)
    party, descriptor = Party("d0", "epoch-9", 0), PeerSlots(theirs.memory).descriptor
    far.attach(party, descriptor)
    assert far.reaches(party)
    theirs.close()
    far.attach(party, descriptor)
    assert not far.reaches(party)
    far.close()


@pytest.mark.parametrize("end", ["the staging's", "the target's"])
def test_slots_of_targets_are_unmapped_at_the_end(end):
    theirs, far = allocate_shared(1 << 16, "target"), PeerSlots(ARENA)
    party = Party("d0", "epoch-9", 0)
    far.attach(party, PeerSlots(theirs.memory).descriptor)
    staging = StagingSlots(ARENA, Copying(notifies=True), far)
    assert num_mapped("target") == 2
    if end == "the staging's":
        staging.acquire(Acquire(SlotKey(ClaimKey("l1", party, "q1"), 0, 0), 4096, theirs.memory.address))
        staging.close()
        far.close()
    else:
        theirs.close()
        staging.poll()
    assert num_mapped("target") == (1 if end == "the staging's" else 0)
    theirs.close()
    staging.close()
    far.close()


def num_mapped(name):
    """Mappings of shared memory by its name: its file may be closed already."""
    wait_for_unmapping()
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_slots_of_targets_take_turns_like_our_own():
    """As many at once as would have room in our own memory, which they do not need; larger ones one by one."""
    far = PeerSlots(ARENA)
    owners = {name: allocate_shared(1 << 20, name) for name in ("greedy", "modest")}
    parties = {name: Party(name, "epoch-9", 0) for name in owners}
    for name, memory in owners.items():
        far.attach(parties[name], PeerSlots(memory.memory).descriptor)
    staging = StagingSlots(ARENA, Copying(notifies=True), far)

    def ask(name, number, num_bytes=1 << 14):
        key = SlotKey(ClaimKey("l1", parties[name], "q1"), 0, number)
        staging.acquire(Acquire(key, num_bytes, owners[name].memory.address))
        return key

    greedy, modest = [ask("greedy", number) for number in range(3)], ask("modest", 0)
    assert [event.key for event in staging.poll()] == [greedy[0], modest]
    assert staging.num_slots == 4
    staging.release(modest)
    assert [event.key for event in staging.poll()] == [greedy[1]]
    large = ask("modest", 1, 1 << 19)
    staging.release(greedy[2])
    staging.release(greedy[0])
    assert staging.poll() == []
    staging.release(greedy[1])
    (acquired,) = staging.poll()
    assert acquired == Acquired(large, acquired.address, is_peer_slot=True)
    ctypes.memset(acquired.address, 7, 1 << 19)
    staging.release(large)
    for memory in owners.values():
        memory.close()
    staging.close()


def test_only_what_was_gathered_to_the_end_is_counted():
    theirs = allocate_shared(1 << 16, "target")
    far, party = PeerSlots(ARENA), Party("d0", "epoch-9", 0)
    far.attach(party, PeerSlots(theirs.memory).descriptor)
    mover = Copying(notifies=True)
    staging = StagingSlots(ARENA, mover, far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    for error, counted in (("broken", 0), ("", 4096), ("", 8192)):
        staging.acquire(Acquire(key, 4096, theirs.memory.address))
        staging.poll()
        mover.ended = [Moved(key, error)]
        assert staging.poll() == [Staged(key, error)]
        assert staging.gathered_bytes == counted
        staging.release(key)
    theirs.close()
    staging.close()


@pytest.mark.parametrize("why", ["never attached", "outside", "no such memory", "for a scatter"])
def test_where_the_targets_slot_cannot_be_reached_there_is_one_of_ours(why):
    theirs = allocate_shared(1 << 16, "target")
    far, party = PeerSlots(ARENA), Party("d0", "epoch-9", 0)
    if why == "no such memory":
        far.attach(party, b"nonsense")
    elif why != "never attached":
        far.attach(party, PeerSlots(theirs.memory).descriptor)
    staging = StagingSlots(ARENA, Copying(notifies=True), far)
    key = SlotKey(ClaimKey("l1", party, "q1"), 0, 0)
    address = {"outside": theirs.memory.address + (1 << 16) - 4095, "for a scatter": 0}.get(why, theirs.memory.address)
    staging.acquire(Acquire(key, 4096, address))
    assert staging.poll() == [Acquired(key, ARENA.address + ARENA.size_bytes // 2)]
    theirs.close()
    staging.close()


def test_of_memory_that_nobody_can_attach_nobody_is_told():
    assert PeerSlots(ARENA).descriptor == b""


def test_slots_fit_into_staging_memory_and_into_an_offer():
    """Eight each way, but no less than one page, and no more than the wire can say."""
    assert [slot_bytes_in(size) for size in (1 << 14, 256 << 20, 1 << 40)] == [4096, 16 << 20, MAX_SLOT_BYTES]
