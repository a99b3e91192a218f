"""Faults happen to the tickets that are named, and to no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from faulty_transport import Fault, FaultKind, FaultyTransport
from memory_transport import MemoryFabric, MemoryTransport

from kvferry.testing.transports.world import POISON, Row, World, copies_of
from kvferry.transport.base import Completion, Direction

ROWS = [Row((0, 10), (0, 20), 100), Row((1, 10), (1, 200), 60)]


@pytest.fixture
def spoiled() -> Iterator[Callable[[Fault], World]]:
    worlds: list[World] = []

    def start(fault: Fault) -> World:
        fabric = MemoryFabric()
        worlds.append(World(lambda: FaultyTransport(MemoryTransport(fabric), [fault])))
        for view in worlds[0].near.views:
            view.fill(POISON)
        return worlds[0]

    yield start
    for world in worlds:
        world.close()


def poll(world: World, times: int) -> list[Completion]:
    return [completion for _ in range(times) for completion in world.near.transport.poll()]


def arrived(world: World) -> int:
    """Bits that differ from what should have arrived."""
    wrong = 0
    for row in ROWS:
        found = world.near.views[row.target[0]][row.target[1] :][: row.length]
        wanted = world.far.views[row.source[0]][row.source[1] :][: row.length]
        wrong += int(np.bitwise_count(found ^ wanted).sum())
    return wrong


def test_a_delayed_ticket_moves_its_bytes_late(spoiled: Callable[[Fault], World]) -> None:
    world = spoiled(Fault(0, FaultKind.DELAY, polls=3))
    ticket = world.post(copies_of(world, ROWS, Direction.READ), Direction.READ)
    assert poll(world, 2) == []
    assert all((view == POISON).all() for view in world.near.views)
    assert poll(world, 1) == [Completion(ticket, "")]
    assert arrived(world) == 0


def test_a_dropped_ticket_ends_with_its_peer(spoiled: Callable[[Fault], World]) -> None:
    world = spoiled(Fault(0, FaultKind.DROP))
    ticket = world.post(copies_of(world, ROWS, Direction.READ), Direction.READ)
    world.near.transport.cancel(ticket)
    assert poll(world, 100) == []
    world.near.transport.disconnect("far")
    assert [(end.ticket, bool(end.error)) for end in poll(world, 2)] == [(ticket, True)]
    assert all((view == POISON).all() for view in world.near.views)


def test_a_failed_ticket_ends_with_an_error(spoiled: Callable[[Fault], World]) -> None:
    world = spoiled(Fault(0, FaultKind.FAIL))
    ticket = world.post(copies_of(world, ROWS, Direction.READ), Direction.READ)
    assert poll(world, 2) == [Completion(ticket, "injected fault")]


@pytest.mark.parametrize("bit", [0, 7, 799, 800, 1279, 1280, 12345])
def test_a_flipped_bit_is_one_bit(spoiled: Callable[[Fault], World], bit: int) -> None:
    world = spoiled(Fault(1, FaultKind.FLIP, bit=bit))
    copies = copies_of(world, ROWS, Direction.READ)
    assert world.run(copies, Direction.READ) == ""
    assert arrived(world) == 0
    assert world.run(copies, Direction.READ) == ""
    assert arrived(world) == 1
    assert world.run(copies, Direction.READ) == ""
    assert arrived(world) == 0


def test_a_delayed_ticket_can_be_cancelled(spoiled: Callable[[Fault], World]) -> None:
    world = spoiled(Fault(0, FaultKind.DELAY, polls=9))
    ticket = world.post(copies_of(world, ROWS, Direction.READ), Direction.READ)
    world.near.transport.cancel(ticket)
    assert poll(world, 20) == [Completion(ticket, "cancelled")]


def test_a_delayed_ticket_to_nobody_ends_with_the_reason(spoiled: Callable[[Fault], World]) -> None:
    world = spoiled(Fault(0, FaultKind.DELAY, polls=1))
    copies = copies_of(world, ROWS, Direction.READ)
    ticket = world.near.transport.post("nobody", copies, Direction.READ)
    (end,) = poll(world, 3)
    assert end.ticket == ticket
    assert "not connected" in end.error
