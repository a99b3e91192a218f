"""What is special about engines of one process: memory can be taken back under a peer's copy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from memory_transport import MemoryFabric, MemoryTransport

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.world import PIECE_BYTES, Row, World, copies_of
from kvferry.transport.base import Completion, Direction
from kvferry.transport.rowcopy.copy_queue import QUANTUM_BYTES, SLICE_BYTES


@pytest.fixture
def world() -> Iterator[World]:
    fabric = MemoryFabric()
    made = World(lambda: MemoryTransport(fabric))
    yield made
    made.close()


def test_tickets_end_when_memory_is_taken_back(world: World) -> None:
    ticket = world.post(copies_of(world, [Row((0, 0), (0, 0), 100)], Direction.READ), Direction.READ)
    world.far.transport.unregister(world.far.shared[0].memory)
    assert "unregistered" in world.finish([ticket])[ticket].error


def test_a_closed_peer_ends_tickets_and_is_not_found_again(world: World) -> None:
    copies = copies_of(world, [Row((0, 0), (0, 0), 100)], Direction.READ)
    ticket, descriptor = world.post(copies, Direction.READ), world.far.transport.descriptor()
    world.far.transport.close()
    assert "closed" in world.finish([ticket])[ticket].error
    with pytest.raises(TransportError, match="not connected"):
        world.post(copies, Direction.READ)
    with pytest.raises(TransportError, match="not in this process"):
        world.near.transport.connect("far", descriptor)


def test_a_poll_is_bounded_and_tickets_take_turns(world: World) -> None:
    num_rows = (QUANTUM_BYTES + 2 * SLICE_BYTES) // PIECE_BYTES
    columns = [
        np.full(num_rows, n, np.uint64) for n in (world.far.address(0, 0), world.near.address(0, 0), PIECE_BYTES)
    ]
    long = world.post(Copies(columns[0], columns[1], columns[2], num_rows), Direction.READ)
    short = world.post(copies_of(world, [Row((1, 0), (1, 0), 100)], Direction.READ), Direction.READ)
    polls = [world.near.transport.poll() for _ in range(QUANTUM_BYTES // SLICE_BYTES + 1)]
    assert polls[:-2] == [[]] * (len(polls) - 2)
    assert polls[-2] + polls[-1] == [Completion(short, "")]
    assert world.finish([long])[long].error == ""


def test_tickets_of_one_size_end_one_after_the_other(world: World) -> None:
    columns = [
        np.full(2 * SLICE_BYTES // PIECE_BYTES, n, np.uint64)
        for n in (world.far.address(0, 0), world.near.address(0, 0), PIECE_BYTES)
    ]
    copies = Copies(columns[0], columns[1], columns[2], len(columns[0]))
    tickets = [world.post(copies, Direction.READ) for _ in range(3)]
    ended = [world.near.transport.poll() for _ in range(6)]
    assert [completion.ticket for some in ended for completion in some] == tickets
    assert [len(some) for some in ended] == [0, 1, 0, 1, 0, 1]
