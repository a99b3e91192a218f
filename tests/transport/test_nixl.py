"""What is special about NIXL. The facts that the adapter relies on are in its docstring."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.extras import MissingExtraError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.world import World
from kvferry.transport.base import Direction, Memory, Ticket
from kvferry.transport.nixl import remote_agents
from kvferry.transport.nixl import transport as adapter
from kvferry.transport.nixl.descriptor_lists import PART_BYTES, PART_ROWS, Part, cut, descriptor_list
from kvferry.transport.nixl.metadata import NixlDescriptor, seal
from kvferry.transport.nixl.transport import NixlTransport

pytest.importorskip("nixl_cu13")


@pytest.fixture
def world() -> Iterator[World]:
    made = World(NixlTransport)
    yield made
    made.close()


def test_flipped_bytes_never_reach_nixl(world: World) -> None:
    good = world.far.transport.descriptor()
    dice = np.random.default_rng(1)
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << int(dice.integers(0, 8))
        with pytest.raises(TransportError, match="damaged"):
            world.near.transport.connect("peer", bytes(flipped))
    for size in range(len(good)):
        with pytest.raises(TransportError, match="damaged"):
            world.near.transport.connect("peer", good[:size])


def test_a_transport_is_not_its_own_peer(world: World) -> None:
    with pytest.raises(TransportError, match="this transport itself"):
        world.near.transport.connect("me", world.near.transport.descriptor())


def test_long_tickets_go_in_parts_and_let_short_ones_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 4 * PART_ROWS
    source = np.full(num_rows, world.far.address(0, 5), np.uint64)
    target = np.arange(num_rows, dtype=np.uint64) + np.uint64(world.near.address(0, 0))
    posted = record_posts(world, monkeypatch)
    long = world.post(Copies(source, target, np.ones(num_rows, np.uint64), num_rows), Direction.READ)
    row = [np.array([n], np.uint64) for n in (world.far.address(1, 0), world.near.address(1, 0), 100)]
    short = world.post(Copies(row[0], row[1], row[2], 1), Direction.READ)
    ended = world.finish([long, short])
    assert posted == [long, short, long, long, long]
    assert all(completion.error == "" for completion in ended.values())
    assert (world.near.views[0][:num_rows] == world.far.views[0][5]).all()


def test_a_ticket_that_has_ended_is_told_before_the_next_is_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = [np.array([n], np.uint64) for n in (world.far.address(1, 0), world.near.address(1, 0), 100)]
    copies = Copies(row[0], row[1], row[2], 1)
    # The first one connects, and ends later.
    world.finish([world.post(copies, Direction.READ)])
    posted = record_posts(world, monkeypatch)
    tickets = [world.post(copies, Direction.READ) for _ in range(3)]
    ended = world.near.transport.poll()
    assert len(ended) <= 1
    assert not ended or posted == [tickets[0]] == [ended[0].ticket]
    world.finish([ticket for ticket in tickets if ticket not in [each.ticket for each in ended]])


def test_parts_are_bounded_in_rows_and_bytes() -> None:
    length = np.array([1] * (PART_ROWS + 3) + [PART_BYTES] * 2 + [PART_BYTES // 2] * 4, np.uint64)
    address = np.cumsum(length)
    rows = descriptor_list(address, length)
    parts = cut(rows, rows)
    assert np.array_equal(np.concatenate([near for near, _ in parts]), rows)
    assert all(len(near) <= PART_ROWS and int(near[:, 1].sum()) <= PART_BYTES for near, _ in parts)
    assert all(near.flags.c_contiguous and near.dtype == np.uint64 for near, _ in parts)


def test_metadata_of_another_agent_is_refused(world: World) -> None:
    own = decode(world.far.transport.descriptor())
    body = msgspec.msgpack.encode(msgspec.structs.replace(own, agent="somebody-else"))
    with pytest.raises(TransportError, match="another agent"):
        world.near.transport.connect("peer", seal(body))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"^NIXL is not installed: pip install 'kvferry\[nixl\]'"):
        NixlTransport()


def test_a_package_that_cannot_be_loaded_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file", name="nixl_cu13._bindings")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(TransportError, match=r"cannot be loaded; found: libcudart"):
        NixlTransport()


def decode(descriptor: bytes) -> NixlDescriptor:
    return msgspec.msgpack.decode(descriptor[28:], type=NixlDescriptor)


def test_a_disconnected_ticket_ends_with_an_error(world: World) -> None:
    row = [np.array([n], np.uint64) for n in (world.far.address(1, 0), world.near.address(1, 0), 100)]
    ticket = world.post(Copies(row[0], row[1], row[2], 1), Direction.READ)
    world.near.transport.disconnect("far")
    assert "disconnected" in world.finish([ticket])[ticket].error


def test_of_the_agents_that_nobody_needs_only_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agents, "MAX_IDLE_AGENTS", 2)
    near, *far = (NixlTransport() for _ in range(5))
    descriptors = [each.descriptor() for each in far]
    names = [decode(each).agent for each in descriptors]
    # The first one was needed again after the second.
    for number, kept in ((0, [0]), (1, [0, 1]), (0, [1, 0]), (2, [0, 2]), (3, [2, 3])):
        near.connect("peer", descriptors[number])
        near.disconnect("peer")
        assert list(near._remote_agents._loaded) == [names[each] for each in kept]
    for each in (near, *far):
        each.close()


def test_a_failed_connection_is_replaced_as_soon_as_the_peer_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt may leave a socket open: they become rare, until the peer is met again."""
    near = world.near.transport
    assert isinstance(near, NixlTransport)
    now, attempts, add = [100.0], [], near._agent.add_remote_agent
    (name,) = near._remote_agents._loaded
    row = [np.array([n], np.uint64) for n in (world.far.address(1, 0), world.near.address(1, 0), 100)]

    def read() -> str:
        return world.run(Copies(row[0], row[1], row[2], 1), Direction.READ)

    def refuse(metadata: bytes) -> None:
        attempts.append(now[0])
        raise near._errors[0]("nobody there")

    monkeypatch.setattr(remote_agents.time, "monotonic", lambda: now[0])
    near._remote_agents.failed(name)
    near._agent.add_remote_agent = refuse
    for _ in range(260):
        assert "lost the connection" in read()
        now[0] += 0.5
    assert attempts == [100.0, 101.0, 103.0, 107.0, 115.0, 131.0, 163.0, 223.0]
    near.connect("far", world.far.transport.descriptor())
    assert "nobody there" in read()
    assert attempts[8:] == [230.0]
    del near._agent.add_remote_agent
    now[0] += remote_agents.MAX_DELAY_S
    assert read() == ""
    near._agent.add_remote_agent = refuse
    assert read() == ""
    near._agent.add_remote_agent = add


def test_what_fails_a_second_time_ends_its_ticket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    near = world.near.transport
    assert isinstance(near, NixlTransport)
    row = [np.array([n], np.uint64) for n in (world.far.address(1, 0), world.near.address(1, 0), 100)]
    with monkeypatch.context() as patch:
        posted = []
        patch.setattr(near._agent, "transfer", lambda handle: posted.append(handle) or LOST)
        assert world.run(Copies(row[0], row[1], row[2], 1), Direction.READ) == f"NIXL: {LOST}"
    assert len(posted) == 2
    # Another connection was no better: the next one has time, unless the peer is met again.
    assert "lost the connection" in world.run(Copies(row[0], row[1], row[2], 1), Direction.READ)
    near.connect("far", world.far.transport.descriptor())
    assert world.run(Copies(row[0], row[1], row[2], 1), Direction.READ) == ""


LOST = "nixlRemoteDisconnectError('NIXL_ERR_REMOTE_DISCONNECT')"
GONE = "nixlNotFoundError('NIXL_ERR_NOT_FOUND')"


class Scripted:
    """What NIXL says of transfers, in place of what it does: their states, in the order in which they were posted."""

    def __init__(
        self, world: World, monkeypatch: pytest.MonkeyPatch, *directions: Direction, can_renew: bool = True
    ) -> None:
        near = world.near.transport
        assert isinstance(near, NixlTransport)
        self.near, self.states, self.renewed, self._handles = near, [], [], []
        self._can_renew = can_renew
        monkeypatch.setattr(near._agent, "transfer", self._begin)
        monkeypatch.setattr(near._agent, "check_xfer_state", lambda handle: self.states[self._handles.index(handle)])
        monkeypatch.setattr(near._remote_agents, "renew", self._renew)
        source, target = world.far.address(1, 0), world.near.address(1, 0)
        self.tickets = []
        for direction in directions or (Direction.READ, Direction.READ):
            ends = (source, target) if direction is Direction.READ else (target, source)
            row = [np.array([n], np.uint64) for n in (*ends, 100)]
            self.tickets.append(world.post(Copies(row[0], row[1], row[2], 1), direction))

    def _begin(self, handle: object) -> str:
        self._handles.append(handle)
        self.states.append("PROC")
        return "PROC"

    def _renew(self, name: str) -> None:
        self.renewed.append(name)
        if not self._can_renew:
            raise TransportError("cannot open another")
        self.near._remote_agents._loaded[name].has_failed = False

    def ends(self) -> list[tuple[int, str]]:
        return [(self.tickets.index(each.ticket), each.error) for each in self.near.poll()]


def test_nothing_of_what_was_given_up_is_posted_a_second_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = Scripted(world, monkeypatch)
    nixl.near.poll()
    nixl.near.cancel(nixl.tickets[0])
    nixl.states[0] = LOST
    assert nixl.ends() == [(0, "cancelled")]
    nixl.states[1] = "DONE"
    assert nixl.ends() == [(1, "")]
    assert (len(nixl.states), nixl.renewed) == (2, [])


def test_a_failed_connection_is_not_replaced_under_what_is_in_progress(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = Scripted(world, monkeypatch)
    nixl.near.poll()
    nixl.states[0] = LOST
    assert nixl.ends() == nixl.ends() == []
    assert (len(nixl.states), nixl.renewed) == (2, [])
    nixl.states[1] = GONE
    assert nixl.ends() == []
    assert (len(nixl.states), len(nixl.renewed)) == (4, 1)
    nixl.states[2:] = "DONE", "DONE"
    assert nixl.ends() == [(0, ""), (1, "")]


def test_what_is_written_is_not_posted_a_second_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first attempt has sent may arrive when the second has ended well, in blocks of somebody else."""
    nixl = Scripted(world, monkeypatch, Direction.WRITE, Direction.READ)
    nixl.near.poll()
    nixl.states[:] = LOST, LOST
    assert nixl.ends() == [(0, f"NIXL: {LOST}")]
    assert nixl.ends() == []
    assert (len(nixl.states), len(nixl.renewed)) == (3, 1)
    nixl.states[2:] = ["DONE"]
    assert nixl.ends() == [(1, "")]


def test_a_transfer_that_fails_by_itself_says_nothing_of_the_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = Scripted(world, monkeypatch)
    nixl.near.poll()
    nixl.states[:] = "NIXL_ERR_BACKEND", "DONE"
    assert nixl.ends() == [(0, "NIXL: NIXL_ERR_BACKEND"), (1, "")]
    assert (len(nixl.states), nixl.renewed) == (2, [])


def test_only_what_still_waits_fails_with_the_connection_that_cannot_be_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = Scripted(world, monkeypatch, can_renew=False)
    nixl.near.poll()
    nixl.states[:] = LOST, "DONE"
    assert nixl.ends() == [(0, f"NIXL: {LOST}; cannot open another"), (1, "")]


def test_memory_that_changes_under_what_is_in_progress_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = Scripted(world, monkeypatch)
    nixl.near.poll()
    world.far.allocate(4096, seed=9)
    with pytest.raises(TransportError, match="memory changed while transfers with it are in progress"):
        nixl.near.connect("far", world.far.transport.descriptor())
    nixl.states[:] = "DONE", "DONE"
    nixl.near.poll()


def test_what_nixl_cannot_do_with_memory_is_an_error_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, buffer = NixlTransport(), np.zeros(8192, np.uint8)
    memory = Memory(int(buffer.ctypes.data), buffer.size, -1)
    transport.register(memory)

    def refuse(*_: object) -> None:
        raise transport._errors[0]("no")

    with monkeypatch.context() as patch:
        for name in ("deregister_memory", "get_agent_metadata"):
            patch.setattr(transport._agent, name, refuse)
        with pytest.raises(TransportError, match="cannot describe its memory"):
            transport.descriptor()
        with pytest.raises(TransportError, match="cannot deregister memory"):
            transport.unregister(memory)
    # Both know that it is registered no more: rows are told by the one which kind of memory the other says they are in.
    assert (transport._registry.memories, len(transport._devices.kinds)) == ((), 0)
    transport.close()


def record_posts(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """The tickets whose parts are posted, in order."""
    transport, posted = world.near.transport, []
    assert isinstance(transport, NixlTransport)
    post_part = transport._post_part

    def record(job: adapter.Job, part: Part) -> None:
        posted.append(job.ticket)
        post_part(job, part)

    monkeypatch.setattr(transport, "_post_part", record)
    return posted
