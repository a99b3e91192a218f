"""Two transports of one process and their memory, in which `kvferry.testing.transports.contract` plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket, Transport
from kvferry.transport.registered_memory import View
from kvferry.transport.selection.self_test import fill_probe
from kvferry.transport.shm.transport import SharedMemory, allocate_shared

DEADLINE_S = 30.0
POISON = 0xA5
"""What fills memory before it is written."""
PIECE_BYTES = 96 << 10
"""The size of each of a party's two pieces of memory."""


@dataclass(slots=True)
class Party:
    """A transport, and two pieces of memory registered with it."""

    transport: Transport
    shared: list[SharedMemory] = field(default_factory=list)
    views: list[View] = field(default_factory=list)

    def allocate(self, num_bytes: int, seed: int) -> Memory:
        """Register new memory filled with a pattern."""
        piece = allocate_shared(num_bytes, "contract")
        self.shared.append(piece)
        self.views.append(np.frombuffer(piece.buffer, np.uint8))
        fill_probe(self.views[-1], seed)
        self.transport.register(piece.memory)
        return piece.memory

    def address(self, piece: int, offset: int) -> int:
        """Where byte `offset` of a piece is."""
        return self.shared[piece].memory.address + offset

    def close(self) -> None:
        self.transport.close()
        self.views.clear()
        for piece in self.shared:
            piece.close()


class World:
    """Two parties of one process; `near` is connected to `far` under the name `far`. Close it at the end."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.make = make
        self.near, self.far = self._party(1), self._party(2)
        self.near.transport.connect("far", self.far.transport.descriptor())

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def restart_far(self) -> None:
        """The far engine ends and starts again, in other memory."""
        self.far.close()
        self.far = self._party(3)

    def sides(self, direction: Direction) -> tuple[Party, Party]:
        """Who is read, and who is written."""
        return (self.far, self.near) if direction is Direction.READ else (self.near, self.far)

    def finish_both(self, near: Ticket, far: Ticket) -> None:
        """Poll both sides until one ticket of each has ended, well."""
        ended: list[Completion] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(ended) < 2:
            ended += [*self.near.transport.poll(), *self.far.transport.poll()]
            assert time.monotonic() < deadline
            time.sleep(0)
        assert all(completion.error == "" for completion in ended)
        assert {completion.ticket for completion in ended} == {near, far}

    def post(self, copies: Copies, direction: Direction) -> Ticket:
        return self.near.transport.post("far", copies, direction)

    def finish(self, tickets: Iterable[Ticket]) -> dict[Ticket, Completion]:
        """Poll both sides until these tickets have ended."""
        return finish(self.near.transport, tickets, self.far.transport)

    def run(self, copies: Copies, direction: Direction) -> str:
        """Post and finish; the error."""
        ticket = self.post(copies, direction)
        return self.finish([ticket])[ticket].error

    def _party(self, seed: int) -> Party:
        party = Party(self.make())
        party.allocate(PIECE_BYTES, seed)
        party.allocate(PIECE_BYTES, seed + 100)
        return party


@dataclass(frozen=True, slots=True)
class Row:
    """One row: (piece, offset) on the side that is read, the same on the one that is written, and a length."""

    source: tuple[int, int]
    target: tuple[int, int]
    length: int


def finish(transport: Transport, tickets: Iterable[Ticket], *others: Transport) -> dict[Ticket, Completion]:
    """Poll until these tickets have ended, exactly once each, and nothing else has."""
    waiting, ended = set(tickets), dict[Ticket, Completion]()
    deadline = time.monotonic() + DEADLINE_S
    while waiting:
        for completion in transport.poll():
            assert completion.ticket in waiting, f"{completion} was not expected"
            waiting.remove(completion.ticket)
            ended[completion.ticket] = completion
        for other in others:
            assert other.poll() == []
        assert time.monotonic() < deadline, f"{waiting} did not end in time"
        time.sleep(0)  # Lets a transport's own threads run.
    assert transport.poll() == []
    return ended


def copies_of(world: World, rows: Iterable[Row], direction: Direction) -> Copies:
    """Rows as addresses."""
    source, target = world.sides(direction)
    found = list(rows)
    return Copies(
        np.array([source.address(*row.source) for row in found], np.uint64),
        np.array([target.address(*row.target) for row in found], np.uint64),
        np.array([row.length for row in found], np.uint64),
        len(found),
    )


def expect_copied(world: World, rows: list[Row], *directions: Direction) -> None:
    """Run the rows in these directions, or both, and check every byte of the written side: those of the rows and those
    that must stay."""
    for direction in directions or Direction:
        source, target = world.sides(direction)
        for view in target.views:
            view.fill(POISON)
        expected = [view.copy() for view in target.views]
        before = [view.copy() for view in source.views]
        for row in rows:
            start, goal = row.source[1], row.target[1]
            bytes_read = before[row.source[0]][start : start + row.length]
            expected[row.target[0]][goal : goal + row.length] = bytes_read
        assert world.run(copies_of(world, rows, direction), direction) == ""
        for found, wanted in zip((*target.views, *source.views), (*expected, *before), strict=True):
            assert np.array_equal(found, wanted)


def random_rows(seed: int, num_rows: int, max_bytes: int) -> list[Row]:
    """Rows of 1 to `max_bytes` bytes at any alignment in any piece; targets do not overlap."""
    dice = np.random.default_rng(seed)
    rows, free = [], [1, 3]
    for length in dice.integers(1, max_bytes + 1, num_rows).tolist():
        piece = int(dice.integers(0, 2))
        if free[piece] + length > PIECE_BYTES:
            break
        start = int(dice.integers(0, PIECE_BYTES - length + 1))
        rows.append(Row((int(dice.integers(0, 2)), start), (piece, free[piece]), length))
        free[piece] += length + int(dice.integers(0, 3))
    return [rows[i] for i in dice.permutation(len(rows)).tolist()]


@contextmanager
def expect_transport_error() -> Iterator[None]:
    """The block must raise TransportError."""
    try:
        yield
    except TransportError:
        return
    raise AssertionError("a TransportError was expected")
