"""What is special about sockets: strangers, malformed requests, peers that stall."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from tcp_peer import (
    KEY_ID,
    PROOF,
    challenged,
    columns,
    frame,
    known,
    rejected,
    request,
    server_of,
    serves_nobody,
    signed,
    wait_for,
)

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.peer import PeerProcess
from kvferry.testing.transports.world import Row, World, copies_of, expect_copied, finish
from kvferry.transport import io_vectors
from kvferry.transport.base import Direction, Memory, Ticket
from kvferry.transport.io_vectors import RowStream, Vectors
from kvferry.transport.tcp import client, server
from kvferry.transport.tcp.connection import (
    CHALLENGE_BYTES,
    CHUNK_BYTES,
    MAX_ROWS,
    Challenge,
    Connection,
    Reply,
    Request,
    proof_of,
)
from kvferry.transport.tcp.lane import Lane, PeerAddress, Transfer
from kvferry.transport.tcp.server import RegistrationLock
from kvferry.transport.tcp.transport import TcpDescriptor, TcpTransport

STALL_S = 0.3
PATIENT_STALL_S = 2.0


def make() -> TcpTransport:
    return TcpTransport(stall_timeout_s=STALL_S)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(make)
    yield made
    made.close()


def answer_to(world: World, data: bytes) -> bytes:
    """What the far side says until it hangs up, which it may do before it has read everything."""
    said = b""
    with socket.create_connection(("127.0.0.1", known(world.far.transport).port), timeout=20) as sock:
        data = signed(data, known(world.far.transport), challenged(sock))
        with suppress(ConnectionError, BrokenPipeError):
            sock.sendall(data)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while more := sock.recv(1 << 16):
                said += more
    return said


def test_strangers_get_nothing(world: World) -> None:
    row = columns((world.far.address(0, 0), 64))
    malformed = [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b""),
        frame(b"\xa1\xff"),
        frame(os.urandom(100)),
        struct.pack(">4sI", b"KVF1", 1 << 31),
        frame(request(b"x" * 32, "read", 1), row),
        frame(request(b"short", "read", 1), row),
        frame(request(known(world.far.transport).key, "read", 1), row),
        frame(request(proof_of(known(world.far.transport).key, Challenge(bytes(16))), "read", 1), row),
        frame(request(PROOF, "erase", 1), row),
        frame(request(PROOF, "read", 0)),
        frame(request(PROOF, "read", MAX_ROWS + 1)),
        frame(request(PROOF, "read", -1)),
    ]
    for number, data in enumerate(malformed, start=1):
        assert answer_to(world, data) == b""
        wait_for(lambda number=number: rejected(world) == number)
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)


def test_the_key_is_never_sent_and_no_proof_is_good_for_two_connections(world: World) -> None:
    place = ("127.0.0.1", known(world.far.transport).port)
    with socket.create_connection(place) as one, socket.create_connection(place) as other:
        challenges = [challenged(one), challenged(other)]
        proof = proof_of(known(world.far.transport).key, challenges[0])
        assert challenges[0] != challenges[1]
        assert known(world.far.transport).key not in proof
        asked = frame(request(proof, "read", 1), columns((world.far.address(0, 0), 64)))
        other.sendall(asked.replace(KEY_ID, known(world.far.transport).key_id))
        said = b""
        with suppress(ConnectionError):
            said = other.recv(1)
        assert said == b""
        assert rejected(world) == 1


def own_descriptor(world: World, peer: str) -> TcpDescriptor:
    transport = world.far.transport
    assert isinstance(transport, TcpTransport)
    return msgspec.msgpack.decode(transport.descriptor_for(peer, transport.descriptor()), type=TcpDescriptor)


@pytest.mark.parametrize("whose_proof", ["its own", "the first one's"])
def test_a_connection_has_one_key(world: World, whose_proof: str) -> None:
    descriptors = [own_descriptor(world, peer) for peer in ("one", "other")]
    row = columns((world.far.address(0, 0), 64))
    with socket.create_connection(("127.0.0.1", descriptors[0].port), timeout=20) as sock:
        challenge = challenged(sock)
        first, second = (signed(frame(request(PROOF, "read", 1), row), each, challenge) for each in descriptors)
        if whose_proof != "its own":
            second = first.replace(descriptors[0].key_id, descriptors[1].key_id)
        sock.sendall(first)
        said = b""
        while not said.endswith(world.far.views[0][:64].tobytes()):
            said += sock.recv(1 << 16)
        sock.sendall(second)
        with suppress(ConnectionError):
            assert sock.recv(1) == b""
    wait_for(lambda: rejected(world) == 1)


def test_the_connections_of_a_revoked_peer_end() -> None:
    """At once, also those that rest or wait for its bytes."""
    world = World(lambda: TcpTransport(stall_timeout_s=60.0))
    transport, descriptor = world.far.transport, own_descriptor(world, "lost")
    assert isinstance(transport, TcpTransport)
    with socket.create_connection(("127.0.0.1", descriptor.port), timeout=20) as sock:
        announced = frame(request(PROOF, "write", 1), columns((world.far.address(0, 0), 64)))
        sock.sendall(signed(announced, descriptor, challenged(sock)) + b"\xff" * 32)
        assert b"reply" in sock.recv(1 << 16)
        transport.revoke("lost")
        with suppress(ConnectionError):
            assert sock.recv(1) == b""
    world.close()


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_a_revoked_peer_is_sending_does_not_arrive(monkeypatch: pytest.MonkeyPatch, is_interrupted: bool) -> None:
    """It had begun with a valid key, and goes on as a process does that was stopped: perhaps too fast to be stopped."""
    world = World(lambda: TcpTransport(stall_timeout_s=60.0))
    transport = world.far.transport
    assert isinstance(transport, TcpTransport)
    if not is_interrupted:
        monkeypatch.setattr(Connection, "interrupt", lambda self: None)
    descriptor, before = own_descriptor(world, "stopped"), world.far.views[0].copy()
    with socket.create_connection(("127.0.0.1", descriptor.port), timeout=20) as sock:
        challenge = challenged(sock)
        announced = frame(request(PROOF, "write", 1), columns((world.far.address(0, 0), 64)))
        sock.sendall(signed(announced, descriptor, challenge) + b"\xff" * 32)
        assert b"reply" in sock.recv(1 << 16)
        wait_for(lambda: bool((world.far.views[0][:32] == 0xFF).all()))
        transport.revoke("stopped")
        with suppress(OSError):
            sock.sendall(b"\xff" * 32)
        with suppress(OSError):
            assert sock.recv(1) == b""
    wait_for(lambda: serves_nobody(server_of(world)))
    assert np.array_equal(world.far.views[0][32:], before[32:])
    monkeypatch.undo()
    world.close()


def test_a_peer_is_not_revoked_while_its_bytes_are_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When `revoke` returns they are all there, or none will be."""
    transport = world.far.transport
    assert isinstance(transport, TcpTransport)
    copying, goes_on, revoked = threading.Event(), threading.Event(), threading.Event()
    receive = io_vectors.receive

    def slow(fd: int, vectors: Vectors, flags: int) -> int:
        copying.set()
        assert goes_on.wait(20)
        return receive(fd, vectors, flags)

    monkeypatch.setattr(io_vectors, "receive", slow)
    world.near.transport.connect("far", transport.descriptor_for("near", transport.descriptor()))
    ticket = world.post(copies_of(world, [Row((0, 0), (0, 0), 64)], Direction.WRITE), Direction.WRITE)
    assert copying.wait(20)

    def revoke() -> None:
        transport.revoke("near")
        revoked.set()

    thread = threading.Thread(target=revoke)
    thread.start()
    wait_for(lambda: transport._server.registration._is_exclusive)
    assert not revoked.is_set()
    goes_on.set()
    thread.join(20)
    assert revoked.is_set()
    assert np.array_equal(world.far.views[0][:64], world.near.views[0][:64])
    world.finish([ticket])


def test_rows_outside_are_refused_by_the_serving_side(world: World) -> None:
    bad = [(world.far.address(0, 0) - 1, 64), (1, 64), (world.far.address(1, 0), 1 << 40), (2**64 - 1, 2)]
    bad += [(world.far.address(0, 0), 0), (world.far.address(0, 0), CHUNK_BYTES + 1)]
    for number, row in enumerate(bad, start=1):
        for_direction = "write" if number % 2 else "read"
        said = answer_to(world, frame(request(PROOF, for_direction, 1), columns(row)))
        assert b"row" in said
    wait_for(lambda: rejected(world) >= len(bad))
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.WRITE)


def test_a_request_that_is_cut_off_writes_no_more_than_came(world: World) -> None:
    before = world.far.views[0].copy()
    whole = frame(request(PROOF, "write", 1), columns((world.far.address(0, 0), 64)))
    answer_to(world, whole + b"\xff" * 63)
    answer_to(world, whole[:-5])
    answer_to(world, whole[:5])
    assert (world.far.views[0][:63] == 0xFF).all()
    assert np.array_equal(world.far.views[0][63:], before[63:])
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)


def test_memory_that_was_taken_back_is_refused_by_the_serving_side(world: World) -> None:
    rows = Copies(*(np.array([n], np.uint64) for n in (world.far.address(0, 0), world.near.address(0, 0), 8)), 1)
    world.far.transport.unregister(world.far.shared[0].memory)
    assert "refused" in world.run(rows, Direction.READ)
    world.far.transport.register(world.far.shared[0].memory)
    assert world.run(rows, Direction.READ) == ""


def test_a_hanging_peer_ends_its_tickets() -> None:
    transport, buffer = make(), np.zeros(1 << 20, np.uint8)
    transport.register(Memory(int(buffer.ctypes.data), buffer.size, -1))
    with PeerProcess("tcp", 1 << 20, 1) as peer:
        transport.connect("peer", peer.descriptor)
        row = [np.array([n], np.uint64) for n in (peer.probe.address, buffer.ctypes.data, buffer.size)]
        peer.stop()
        tickets = [transport.post("peer", Copies(row[0], row[1], row[2], 1), Direction.READ) for _ in range(3)]
        tickets += [transport.post("peer", Copies(row[1], row[0], row[2], 1), Direction.WRITE)]
        ended = finish(transport, tickets)
    assert all("the peer sent nothing for 0.3 s" in completion.error for completion in ended.values())
    transport.close()


def test_a_silent_server_ends_its_tickets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport, buffer = make(), np.zeros(64, np.uint8)
        transport.register(Memory(int(buffer.ctypes.data), 64, -1))
        descriptor = TcpDescriptor("127.0.0.1", silent.getsockname()[1], bytes(16), bytes(16), ((4096, 64),))
        transport.connect("peer", msgspec.msgpack.encode(descriptor))
        row = [np.array([n], np.uint64) for n in (4096, buffer.ctypes.data, 64)]
        ticket = transport.post("peer", Copies(row[0], row[1], row[2], 1), Direction.READ)
        assert "nothing for 0.3 s" in finish(transport, [ticket])[ticket].error
        ticket = transport.post("peer", Copies(row[0], row[1], row[2], 1), Direction.READ)
        transport.disconnect("peer")
        assert finish(transport, [ticket])[ticket].error
        transport.close()


def test_after_a_ticket_that_has_failed_the_next_one_has_another_connection() -> None:
    """Else it would take the late bytes of the first for its own."""

    def serve() -> None:
        with listener.accept()[0] as first:
            first.sendall(frame(msgspec.msgpack.encode(Challenge(bytes(CHALLENGE_BYTES)))))
            # It says no more, and neither listens.
            with listener.accept()[0] as second:
                second.sendall(frame(msgspec.msgpack.encode(Challenge(bytes(CHALLENGE_BYTES)))))
                second.recv(1 << 16)
                second.sendall(frame(msgspec.msgpack.encode(Reply(""))) + b"A" * 64)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        server = threading.Thread(target=serve)
        server.start()
        transport, buffer = make(), np.zeros(64, np.uint8)
        transport.register(Memory(int(buffer.ctypes.data), 64, -1))
        descriptor = TcpDescriptor("127.0.0.1", listener.getsockname()[1], bytes(16), bytes(16), ((4096, 64),))
        transport.connect("peer", msgspec.msgpack.encode(descriptor))
        row = [np.array([n], np.uint64) for n in (4096, buffer.ctypes.data, 64)]
        for expected in ("nothing for 0.3 s", ""):
            ticket = transport.post("peer", Copies(row[0], row[1], row[2], 1), Direction.READ)
            error = finish(transport, [ticket])[ticket].error
            assert expected in error
        assert error == ""
        assert bytes(buffer) == b"A" * 64
        transport.close()
        server.join(20)


def test_a_peer_that_is_not_there_is_the_tickets_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    transport, buffer = make(), np.zeros(64, np.uint8)
    transport.register(Memory(int(buffer.ctypes.data), 64, -1))
    transport.connect(
        "peer", msgspec.msgpack.encode(TcpDescriptor("127.0.0.1", port, bytes(16), bytes(16), ((4096, 64),)))
    )
    row = [np.array([n], np.uint64) for n in (4096, buffer.ctypes.data, 64)]
    ticket = transport.post("peer", Copies(row[0], row[1], row[2], 1), Direction.READ)
    assert "Connection refused" in finish(transport, [ticket])[ticket].error
    transport.close()


def test_a_process_that_can_start_no_more_threads_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="no thread can be started for tcp"):
            expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)


def serving_threads() -> list[str]:
    names = ("kvferry-tcp-serve", "kvferry-tcp-lane")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def test_a_connection_that_the_system_does_not_watch_is_closed(patient_world: World) -> None:
    class Full:
        def __init__(self, epoll: select.epoll) -> None:
            self._epoll = epoll

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(self._epoll, name)

    serving = server_of(patient_world)
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    serving._selector = Full(serving._selector)
    wait_for(lambda: serves_nobody(serving))
    assert not serving._idle
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)


@pytest.fixture
def patient_world() -> Iterator[World]:
    """A thread that has to be started first, on a busy machine, is no peer that stalls."""
    made = World(lambda: TcpTransport(stall_timeout_s=PATIENT_STALL_S))
    yield made
    made.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.slow
def test_connections_that_are_not_used_have_no_threads(
    patient_world: World, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "KEEP_THREAD_S", 0.05)
    for _ in range(2):
        expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], direction)
        wait_for(lambda: not serving_threads())
        assert len(server_of(patient_world)._idle) == 1


def test_a_connection_that_ends_while_it_is_not_used_is_forgotten(patient_world: World) -> None:
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    wait_for(lambda: len(server_of(patient_world)._idle) == 1)
    patient_world.near.transport.disconnect("far")
    wait_for(lambda: serves_nobody(server_of(patient_world)) and not server_of(patient_world)._idle)


def test_who_comes_when_there_is_no_room_is_refused_and_those_that_are_known_are_served(
    patient_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    wait_for(lambda: len(server_of(patient_world)._idle) == 1)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    with socket.create_connection(("127.0.0.1", known(patient_world.far.transport).port), timeout=20) as sock:
        assert sock.recv(1) == b""
    assert rejected(patient_world) == 1
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)


def test_who_comes_when_all_threads_are_busy_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_THREADS", 0)
    with socket.create_connection(("127.0.0.1", known(world.far.transport).port), timeout=20) as sock:
        assert sock.recv(1) == b""
    assert rejected(world) == 1


def test_connections_that_are_not_used_end_with_the_server(patient_world: World) -> None:
    expect_copied(patient_world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    serving = server_of(patient_world)
    wait_for(lambda: len(serving._idle) == 1)
    (peer,) = serving._idle.values()
    serving.close(20.0)
    assert peer.connection.fileno() == -1


def test_a_connection_that_has_ended_is_made_again_before_it_is_used(world: World) -> None:
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    for peer in list(server_of(world)._served.values()):
        peer.connection.interrupt()
    wait_for(lambda: serves_nobody(server_of(world)))
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)


def test_a_client_that_was_stopped_opens_no_connection() -> None:
    """Not in the place of one that has ended meanwhile, either."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = Lane(PeerAddress("127.0.0.1", listener.getsockname()[1], b"", b""), STALL_S)
        stopped.stop("over")
        with pytest.raises(ConnectionAbortedError, match="over"):
            stopped.connect()


def test_of_a_read_that_is_cancelled_no_more_comes_than_a_chunk() -> None:
    """However long its request is; the next one has another connection."""
    world = World(lambda: TcpTransport(stall_timeout_s=PATIENT_STALL_S))
    try:
        num_chunks, cancelled = 16, threading.Event()
        for party in (world.near, world.far):
            party.allocate(num_chunks * CHUNK_BYTES, 7)
        world.near.transport.disconnect("far")
        world.near.transport.connect("far", world.far.transport.descriptor())
        world.near.views[-1][:] = 0
        start = np.arange(num_chunks, dtype=np.uint64) * np.uint64(CHUNK_BYTES)
        remote, local = (party.shared[-1].memory.address for party in (world.far, world.near))
        length = np.full(num_chunks, CHUNK_BYTES, np.uint64)
        copies = Copies(start + np.uint64(remote), start + np.uint64(local), length, num_chunks)

        def receive_rows(self: Connection, rows: RowStream) -> None:
            received(self, rows)
            if not cancelled.is_set():
                cancelled.set()
                world.near.transport.cancel(ticket)
                cancelled.wait()

        received = Connection.receive_rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "receive_rows", receive_rows)
            ticket = world.near.transport.post("far", copies, Direction.READ)
            assert world.finish([ticket])[ticket].error == "cancelled"
        assert not world.near.views[-1][CHUNK_BYTES:].any()
        # What is still on its way would be taken for the next answer.
        asking, _ = world.near.transport._peers["far"]
        assert not any(lane.is_connected for lane in asking._lanes)
        assert world.run(copies, Direction.READ) == ""
        assert (world.near.views[-1] == world.far.views[-1]).all()
    finally:
        world.close()


def test_what_a_cancelled_write_still_sends_is_bounded() -> None:
    rows = np.arange(200, dtype=np.uint64)
    length = np.full(200, CHUNK_BYTES, np.uint64)
    sizes = {
        direction: [int(part.length.sum()) for part in Transfer(Ticket(1), direction, rows, rows, length).parts()]
        for direction in Direction
    }
    assert sizes == {Direction.READ: [200 << 20], Direction.WRITE: [64 << 20, 64 << 20, 64 << 20, 8 << 20]}


def test_long_tickets_take_several_requests(world: World) -> None:
    num_rows = MAX_ROWS + 100
    source = np.full(num_rows, world.far.address(0, 5), np.uint64)
    target = np.arange(num_rows, dtype=np.uint64) + np.uint64(world.near.address(0, 0))
    copies = Copies(source, target, np.ones(num_rows, np.uint64), num_rows)
    assert world.run(copies, Direction.READ) == ""
    assert (world.near.views[0][:num_rows] == world.far.views[0][5]).all()


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(TransportError, match="cannot listen"):
        TcpTransport("192.0.2.1")


def test_no_thread_outlives_its_transport() -> None:
    world = World(make)
    expect_copied(world, [Row((0, 0), (1, 3), 100)], Direction.READ)
    world.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry-tcp")]


def test_a_change_of_the_registration_waits_for_copies() -> None:
    lock, order = RegistrationLock(), []
    changing = threading.Event()

    def change() -> None:
        changing.set()
        with lock.exclusive():
            order.append("changed")

    with lock.shared():
        thread = threading.Thread(target=change)
        thread.start()
        assert changing.wait(20)
        order.append("used")
    thread.join(20)
    assert order == ["used", "changed"]


def test_requests_are_small() -> None:
    assert len(msgspec.msgpack.encode(Request(bytes(16), bytes(32), Direction.READ, MAX_ROWS))) < 128


CLOSES_WITH_A_CHILD = """
import os, sys, time
import numpy as np
from kvferry.transport.base import Memory
from kvferry.transport.tcp.transport import TcpTransport
memory = np.zeros(4096, np.uint8)
moving = TcpTransport(stall_timeout_s=0.2)
moving.register(Memory(memory.ctypes.data, memory.size, -1))
print(moving.descriptor().hex(), memory.ctypes.data, flush=True)
sys.stdin.readline()
while not moving._server._idle:
    time.sleep(0.01)
if not os.fork():
    sys.stdin.read()
    os._exit(0)
moving.close()
print("closed", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_a_closed_connection_alive() -> None:
    """It inherits those that rest. This end of its standard input ends it."""
    near, memory = TcpTransport(), np.zeros(4096, np.uint8)
    near.register(Memory(memory.ctypes.data, memory.size, -1))
    command = [sys.executable, "-c", CLOSES_WITH_A_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far:
        descriptor, address = far.stdout.readline().split()
        near.connect("far", bytes.fromhex(descriptor))
        columns = [np.array([number], np.uint64) for number in (int(address), memory.ctypes.data, memory.size)]

        def read() -> str:
            ticket = near.post("far", Copies(*columns, 1), Direction.READ)
            return finish(near, [ticket])[ticket].error

        assert read() == ""
        far.stdin.write("\n")
        far.stdin.flush()
        assert far.stdout.readline() == "closed\n"
        assert re.search("refused|reset|closed", read())
        far.stdin.close()
    near.close()
