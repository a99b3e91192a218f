"""The contract of `kvferry.transport.base`, as checks that every transport must pass.

`CONTRACT` checks two transports of one process.
Each check is a function; use them as the cases of a test, as `tests/transport/test_contract.py` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies, merge
from kvferry.testing.transports.world import (
    PIECE_BYTES,
    POISON,
    Row,
    World,
    copies_of,
    expect_copied,
    expect_transport_error,
    finish,
    random_rows,
)
from kvferry.transport.base import Direction, Memory, NotifyingTransport, RevocableTransport

SEED = 7
TOLD_S = 10.0

Check = Callable[[World], None]


def copies_one_row(world: World) -> None:
    expect_copied(world, [Row((0, 5), (0, 17), 1000)])
    expect_copied(world, [Row((1, PIECE_BYTES - 1), (0, PIECE_BYTES - 1), 1)])
    expect_copied(world, [Row((0, 0), (1, 0), PIECE_BYTES)])


def copies_many_rows_of_random_sizes(world: World) -> None:
    for seed, max_bytes in enumerate((1, 2, 40, 3000, 40_000)):
        expect_copied(world, random_rows(seed, 400, max_bytes))


def copies_many_rows_of_one_size(world: World) -> None:
    order = np.random.default_rng(SEED).permutation(PIECE_BYTES // 512).tolist()
    rows = [Row((i % 2, k * 512), (1 - i % 2, i * 512), 256) for i, k in enumerate(order)]
    expect_copied(world, rows)


def merged_rows_bring_the_same_bytes(world: World) -> None:
    rows = [Row((0, 64 * i), (1, 64 * i + 7), 64) for i in range(100)]
    for direction in Direction:
        expect_copied(world, rows, direction)
        _, target = world.sides(direction)
        wanted = [view.copy() for view in target.views]
        for view in target.views:
            view.fill(POISON)
        merged = merge(copies_of(world, rows, direction), np.zeros(len(rows), np.int64))
        assert len(merged) == 1
        assert world.run(merged, direction) == ""
        assert all(np.array_equal(*pair) for pair in zip(target.views, wanted, strict=True))


def zero_rows_and_empty_rows_end_well(world: World) -> None:
    expect_copied(world, [])
    expect_copied(world, [Row((0, 9), (0, 9), 0)])
    expect_copied(world, [Row((0, 9), (0, 9), 0), Row((1, 1), (1, 2), 3)])


def rows_outside_are_refused_and_write_nothing(world: World) -> None:
    fits = Row((0, 0), (0, 0), 64)
    beyond = (PIECE_BYTES - 8, 1 << 40, -64, -(1 << 33))
    bad = [Row((1, offset), (1, 0), 64) for offset in beyond]
    bad += [Row((1, 0), (1, offset), 64) for offset in beyond]
    bad += [Row((1, 0), (1, 0), 1 << 62)]
    for direction in Direction:
        _, target = world.sides(direction)
        for row in bad:
            for view in target.views:
                view.fill(POISON)
            _expect_refused(world, copies_of(world, [fits, row], direction), direction)
            # The good row may have been copied; nothing else.
            assert all(bool((view[64:] == POISON).all()) for view in target.views)
            assert (target.views[1] == POISON).all()


def private_memory_can_be_the_near_side(world: World) -> None:
    buffer = np.full(1000, POISON, np.uint8)
    memory = Memory(int(buffer.ctypes.data), buffer.size, -1)
    world.near.transport.register(memory)
    column = [np.array([value], np.uint64) for value in (world.far.address(0, 3), memory.address + 1, 998)]
    assert world.run(Copies(column[0], column[1], column[2], 1), Direction.READ) == ""
    world.near.transport.unregister(memory)
    assert np.array_equal(buffer[1:999], world.far.views[0][3:1001])
    assert buffer[0] == buffer[999] == POISON
    with expect_transport_error():
        world.post(Copies(column[0], column[1], column[2], 1), Direction.READ)


def memory_is_registered_once(world: World) -> None:
    known = world.near.shared[0].memory
    for memory in (known, Memory(known.address + 16, 16, -1), Memory(known.address, 0, -1), Memory(0, 8, -1)):
        with expect_transport_error():
            world.near.transport.register(memory)
    with expect_transport_error():
        world.near.transport.unregister(Memory(known.address, 8, -1))
    expect_copied(world, [Row((0, 0), (0, 0), 100)], Direction.READ)


def unknown_peers_are_refused(world: World) -> None:
    copies = copies_of(world, [Row((0, 0), (0, 0), 8)], Direction.READ)
    with expect_transport_error():
        world.near.transport.post("nobody", copies, Direction.READ)
    world.near.transport.disconnect("nobody")
    world.near.transport.disconnect("far")
    with expect_transport_error():
        world.post(copies, Direction.READ)


def disconnecting_ends_open_tickets(world: World) -> None:
    copies = copies_of(world, random_rows(SEED, 200, 900), Direction.READ)
    tickets = [world.post(copies, Direction.READ) for _ in range(5)]
    world.near.transport.disconnect("far")
    world.finish(tickets)
    world.near.transport.connect("far", world.far.transport.descriptor())
    expect_copied(world, random_rows(SEED, 200, 900), Direction.WRITE)


def cancelled_tickets_end_once(world: World) -> None:
    copies = copies_of(world, random_rows(SEED, 200, 900), Direction.READ)
    tickets = [world.post(copies, Direction.READ) for _ in range(4)]
    for ticket in tickets[1:3]:
        world.near.transport.cancel(ticket)
        world.near.transport.cancel(ticket)
    ended = world.finish(tickets)
    assert ended[tickets[0]].error == ended[tickets[3]].error == ""
    world.near.transport.cancel(tickets[0])
    expect_copied(world, [Row((0, 0), (0, 0), 100)], Direction.READ)


def concurrent_tickets_end_once_each(world: World) -> None:
    for view in world.near.views:
        view.fill(POISON)
    rows = [Row((0, 64 * i), (1, 32 * i), 32) for i in range(1000)]
    reads = [world.post(copies_of(world, rows[i::10], Direction.READ), Direction.READ) for i in range(10)]
    assert len(set(reads)) == 10
    ended = world.finish(reads)
    assert all(completion.error == "" for completion in ended.values())
    wanted = world.far.views[0].reshape(-1, 64)[:1000, :32].ravel()
    assert np.array_equal(world.near.views[1][: wanted.size], wanted)
    assert (world.near.views[1][wanted.size :] == POISON).all()


def a_restarted_peer_can_be_connected_again(world: World) -> None:
    expect_copied(world, [Row((0, 0), (0, 0), 100)], Direction.READ)
    stale = copies_of(world, [Row((0, 0), (0, 0), 100)], Direction.READ)
    world.restart_far()
    with suppress(TransportError):  # The old memory is gone: whatever comes of this, it is no crash and it ends.
        world.finish([world.post(stale, Direction.READ)])
    world.near.transport.connect("far", world.far.transport.descriptor())
    expect_copied(world, random_rows(SEED, 100, 2000))


def a_peer_can_register_more_and_be_connected_again(world: World) -> None:
    expect_copied(world, [Row((0, 0), (0, 0), 100)], Direction.READ)
    world.far.allocate(4096, SEED)
    world.near.transport.connect("far", world.far.transport.descriptor())
    copies = copies_of(world, [Row((2, 96), (0, 0), 4000)], Direction.READ)
    assert world.run(copies, Direction.READ) == ""
    assert np.array_equal(world.near.views[0][:4000], world.far.views[2][96:])


def both_sides_can_copy_at_once(world: World) -> None:
    world.far.transport.connect("near", world.near.transport.descriptor())
    there = copies_of(world, [Row((0, 0), (1, 0), 5000)], Direction.WRITE)
    back = copies_of(world, [Row((0, 0), (1, 0), 5000)], Direction.READ)
    near_ticket = world.post(there, Direction.WRITE)
    far_ticket = world.far.transport.post("near", back, Direction.WRITE)
    world.finish_both(near_ticket, far_ticket)
    assert np.array_equal(world.near.views[0][:5000], world.far.views[1][:5000])
    assert np.array_equal(world.far.views[0][:5000], world.near.views[1][:5000])


def garbage_descriptors_are_refused(world: World) -> None:
    good = world.far.transport.descriptor()
    dice = np.random.default_rng(SEED)
    garbage = [b"", b"\x00", b"{}", good + b"\x00", good[: len(good) // 2], good[:-1], dice.bytes(500), bytes(1 << 21)]
    for descriptor in garbage:
        with expect_transport_error():
            world.near.transport.connect("garbage", descriptor)
    for position in range(0, len(good), max(1, len(good) // 60)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << int(dice.integers(0, 8))
        try:
            world.near.transport.connect("flipped", bytes(flipped))
            world.near.transport.disconnect("flipped")
        except TransportError:
            continue
    expect_copied(world, [Row((0, 0), (0, 0), 100)], Direction.READ)


def says_what_carries_the_bytes(world: World) -> None:
    copies_one_row(world)
    carriers = world.near.transport.carriers("far")
    assert carriers
    assert all(carriers)


def tells_that_bytes_have_moved(world: World) -> None:
    moved = world.near.transport.moved
    assert moved("far") == 0
    expect_copied(world, random_rows(SEED, 200, 900), Direction.READ)
    after_read = moved("far")
    assert after_read > 0
    expect_copied(world, random_rows(SEED, 200, 900), Direction.WRITE)
    assert moved("far") > after_read


def ends_are_told_without_a_poll(world: World) -> None:
    near = world.near.transport
    if not isinstance(near, NotifyingTransport):
        return
    told = threading.Event()
    near.notify_with(told.set)
    near.connect("far", world.far.transport.descriptor())
    for ends_early in (False, True):
        ticket = world.post(copies_of(world, random_rows(SEED, 50, 900), Direction.READ), Direction.READ)
        if ends_early:
            near.disconnect("far")
        assert told.wait(TOLD_S)
        told.clear()
        (ended,) = near.poll()
        assert ended.ticket == ticket


def revoked_peers_reach_nothing(world: World) -> None:
    far = world.far.transport
    if not isinstance(far, RevocableTransport):
        return
    far.revoke("near")
    common = far.descriptor()
    world.near.transport.connect("other", far.descriptor_for("other", common))
    world.near.transport.connect("far", far.descriptor_for("near", common))
    expect_copied(world, random_rows(SEED, 50, 900), Direction.WRITE)
    assert far.descriptor_for("near", common) == far.descriptor_for("near", common) != common
    with expect_transport_error():
        far.descriptor_for("near", b"garbage")
    far.revoke("near")
    before = world.far.views[0].copy()
    for direction in (Direction.WRITE, Direction.READ):
        copies = copies_of(world, [Row((0, 0), (0, 64), 100)], direction)
        assert world.run(copies, direction)
    assert np.array_equal(world.far.views[0], before)
    other = world.near.transport.post("other", copies, Direction.READ)
    assert world.finish([other])[other].error == ""
    world.near.transport.connect("far", far.descriptor_for("near", common))
    expect_copied(world, random_rows(SEED, 50, 900), Direction.WRITE)


def closing_ends_open_tickets(world: World) -> None:
    copies = copies_of(world, random_rows(SEED, 200, 900), Direction.READ)
    tickets = [world.post(copies, Direction.READ) for _ in range(3)]
    world.near.transport.close()
    world.near.transport.close()
    finish(world.near.transport, tickets)
    with expect_transport_error():
        world.post(copies, Direction.READ)


def _expect_refused(world: World, copies: Copies, direction: Direction) -> None:
    try:
        ticket = world.post(copies, direction)
    except TransportError:
        return
    assert world.finish([ticket])[ticket].error


CONTRACT: tuple[Check, ...] = (
    copies_one_row,
    copies_many_rows_of_random_sizes,
    copies_many_rows_of_one_size,
    merged_rows_bring_the_same_bytes,
    zero_rows_and_empty_rows_end_well,
    rows_outside_are_refused_and_write_nothing,
    private_memory_can_be_the_near_side,
    memory_is_registered_once,
    unknown_peers_are_refused,
    disconnecting_ends_open_tickets,
    cancelled_tickets_end_once,
    concurrent_tickets_end_once_each,
    a_restarted_peer_can_be_connected_again,
    a_peer_can_register_more_and_be_connected_again,
    both_sides_can_copy_at_once,
    garbage_descriptors_are_refused,
    says_what_carries_the_bytes,
    tells_that_bytes_have_moved,
    ends_are_told_without_a_poll,
    revoked_peers_reach_nothing,
    closing_ends_open_tickets,
)
