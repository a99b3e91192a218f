"""The staging memory of an agent: who is to be asked for the end of a copy, and when a slot is there."""

import pytest

from kvferry.agent.config import slot_bytes_in
from kvferry.agent.stager import Stager
from kvferry.session.events import Acquire, Acquired, PeerKey, ReadKey, SlotKey
from kvferry.transport.base import Memory
from kvferry.wire.messages import MAX_SLOT_BYTES

ARENA = Memory(1 << 20, 1 << 16, -1)
KEY = SlotKey(ReadKey("q1", PeerKey("p0", "e1", "tcp://127.0.0.1:1")), 0, 0)


class Copying:
    """A mover that is never done."""

    busy = True

    def __init__(self, rings):
        self.rings = rings

    def start(self, key, tiles):
        raise AssertionError

    def poll(self):
        return []

    def close(self):
        pass


@pytest.mark.parametrize("rings", [True, False])
def test_only_a_mover_that_does_not_ring_has_to_be_asked_again_and_again(rings):
    stager = Stager(ARENA, Copying(rings))
    assert stager.busy is not rings
    stager.close()


def test_a_wish_for_a_slot_is_answered_by_the_next_poll():
    stager = Stager(ARENA, Copying(rings=True))
    stager.acquire(Acquire(KEY, 4096))
    assert stager.is_changed
    assert stager.poll() == [Acquired(KEY, ARENA.address)]
    assert not stager.is_changed
    stager.release(KEY)
    assert stager.is_changed
    assert stager.poll() == []
    stager.close()


def test_slots_fit_into_staging_memory_and_into_an_offer():
    """Five each way, but no less than one page, and no more than the wire can say."""
    assert [slot_bytes_in(size) for size in (1 << 14, 256 << 20, 1 << 40)] == [4096, 6553 * 4096, MAX_SLOT_BYTES]
