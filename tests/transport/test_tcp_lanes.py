"""Long tickets are divided among connections, and long rows are sent from where they lie."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tcp_peer import (
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

from kvferry.errors import TransportError, WireError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.world import Row, World, expect_copied
from kvferry.transport import io_vectors
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.io_vectors import MAX_VECTORS, RowStream, Vectors
from kvferry.transport.tcp import client, connection, server
from kvferry.transport.tcp.client import NUM_LANES, PeerClient
from kvferry.transport.tcp.connection import CHUNK_BYTES, PROGRESS_BYTES
from kvferry.transport.tcp.lane import Lane, PeerAddress, Transfer
from kvferry.transport.tcp.transport import TcpTransport

STALL_S = 2.0
WAIT_S = 20.0
ROWS = [Row((i % 2, 300 * i), ((i + 1) % 2, 400 * i), 200 + i) for i in range(9)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Whose first connection is there. Tickets of two bytes are divided."""
    monkeypatch.setattr(client, "MIN_SHARE_BYTES", 1)
    made = World(lambda: TcpTransport(stall_timeout_s=STALL_S))
    expect_copied(made, ROWS[:1], Direction.READ)
    yield made
    made.close()


def transfer(lengths: list[int]) -> Transfer:
    numbers = np.arange(len(lengths), dtype=np.uint64)
    return Transfer(Ticket(1), Direction.READ, numbers, numbers, np.array(lengths, np.uint64))


def answer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is answered before there is one on each connection."""
    asked, answer = threading.Barrier(NUM_LANES), server.Server._answer

    def wait_and_answer(*arguments: object) -> None:
        asked.wait(WAIT_S)
        answer(*arguments)

    monkeypatch.setattr(server.Server, "_answer", wait_and_answer)


@given(st.lists(st.integers(1, CHUNK_BYTES), min_size=1, max_size=100))
def test_shares_are_all_rows_in_their_order_and_none_is_much_longer(lengths: list[int]) -> None:
    shares = client._divided(transfer(lengths), NUM_LANES)
    assert [row for share in shares for row in share.remote.tolist()] == list(range(len(lengths)))
    assert [row for share in shares for row in share.local.tolist()] == list(range(len(lengths)))
    total = sum(lengths)
    assert len(shares) == max(1, min(NUM_LANES, total // client.MIN_SHARE_BYTES))
    assert all(abs(int(share.length.sum()) - total / len(shares)) <= 2 * max(lengths) for share in shares)


@pytest.mark.parametrize("direction", Direction)
def test_a_long_ticket_goes_over_all_connections_and_ends_once(
    world: World, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_together(monkeypatch)
    expect_copied(world, ROWS, direction)
    assert world.near.transport.poll() == []


@pytest.mark.slow
def test_only_the_first_connection_is_kept_when_there_is_nothing_to_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "KEEP_THREAD_S", 0.05)
    for _ in range(2):
        expect_copied(world, ROWS, Direction.READ)
        wait_for(lambda: serves_nobody(server_of(world)) and len(server_of(world)._idle) == 1)


@pytest.mark.parametrize("direction", Direction)
def test_a_peer_without_room_for_more_connections_is_asked_over_one(
    world: World, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    expect_copied(world, ROWS, direction)
    assert len(server_of(world)._served) == 1
    assert rejected(world) >= 1


def test_the_first_connection_comes_before_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for one only, the others must not have it."""
    world.near.transport.connect("far", world.far.transport.descriptor())
    wait_for(lambda: serves_nobody(server_of(world)))
    expect_copied(world, ROWS, Direction.READ)
    assert len(server_of(world)._served) == 1
    answer_together(monkeypatch)
    expect_copied(world, ROWS, Direction.READ)


def test_when_one_share_fails_its_ticket_ends_once_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first error, and what has not been asked for is not asked for any more."""
    failed, others, skipped = threading.Event(), threading.Barrier(NUM_LANES), []

    def move(self: Lane, share: Transfer, is_over: Callable[[], str]) -> str:
        others.wait(WAIT_S)
        if share.remote[0] == 0:
            raise TransportError("the first error")
        wait_for(lambda: bool(is_over()))
        failed.wait(WAIT_S)
        skipped.append(is_over())
        return skipped[-1]

    asked, ended = scripted(monkeypatch, move)
    asked.submit(transfer([100] * 8))
    wait_for(lambda: sum(asked._working.values()) == NUM_LANES - 1)
    assert ended.empty()
    failed.set()
    assert ended.get(timeout=WAIT_S) == Completion(Ticket(1), "the first error")
    assert skipped == ["cancelled"] * (NUM_LANES - 1)
    asked.cancel(Ticket(1))
    stop(asked)
    assert ended.empty()


@pytest.mark.parametrize("error", [OSError("no room"), MemoryError("no memory"), WireError("not a challenge")])
def test_a_lane_that_cannot_be_opened_leaves_its_work_to_the_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever the reason is, and it is not tried again at once."""
    tried = []

    def connect(self: Lane) -> None:
        tried.append(self)
        raise error

    asked, ended = scripted(monkeypatch, lambda *_: "", connect)
    asked.submit(transfer([100] * 8))
    assert ended.get(timeout=WAIT_S) == Completion(Ticket(1), "")
    wait_for(lambda: len(asked._working) == 1)
    num_tried = len(tried)
    asked.submit(transfer([100] * 8))
    assert ended.get(timeout=WAIT_S) == Completion(Ticket(1), "")
    assert len(tried) == num_tried <= NUM_LANES - 1
    stop(asked)


def test_a_lane_that_waits_for_its_connection_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer out of descriptors accepts no connection and refuses none."""
    given_up = threading.Event()

    def connect(self: Lane) -> None:
        given_up.wait(WAIT_S)
        raise TimeoutError

    asked, ended = scripted(monkeypatch, lambda *_: "", connect)
    for _ in range(3):
        asked.submit(transfer([100] * 8))
        assert ended.get(timeout=WAIT_S) == Completion(Ticket(1), "")
    given_up.set()
    stop(asked)


def test_a_thread_that_fails_ends_its_tickets_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the error has no text: a ticket without a reason would be one that has succeeded."""

    def fails(self: PeerClient, lane: Lane) -> None:
        raise MemoryError

    monkeypatch.setattr(PeerClient, "_next", fails)
    asked, ended = scripted(monkeypatch, lambda *_: "")
    asked.submit(transfer([100]))
    assert ended.get(timeout=WAIT_S) == Completion(Ticket(1), "MemoryError")
    stop(asked)


def scripted(
    monkeypatch: pytest.MonkeyPatch, move: Callable[..., str], connect: Callable[[Lane], None] = lambda _: None
) -> tuple[PeerClient, SimpleQueue[Completion]]:
    """PeerClient, the first of them connected, that divide all tickets and move them so; and where completions come."""
    monkeypatch.setattr(client, "MIN_SHARE_BYTES", 1)
    for name, value in (("move", move), ("connect", connect), ("is_connected", True)):
        monkeypatch.setattr(Lane, name, value)
    ended: SimpleQueue[Completion] = SimpleQueue()
    return PeerClient(PeerAddress("127.0.0.1", 1, b"", b""), ended.put, STALL_S), ended


def stop(asked: PeerClient) -> None:
    asked.stop("over")
    asked.join(WAIT_S)
    assert asked.is_over


def test_nobody_listens_is_the_error_of_a_divided_ticket(world: World) -> None:
    server_of(world).close(WAIT_S)
    ticket = world.post(rows_of(world, ROWS), Direction.READ)
    assert "refused" in world.finish([ticket])[ticket].error


def test_a_process_that_can_start_one_thread_only_uses_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    lane_threads: list[threading.Thread] = []
    monkeypatch.setattr(client, "KEEP_THREAD_S", 0.05)
    wait_for(lambda: client_of(world).is_over)

    def limited(thread: threading.Thread) -> None:
        if thread.name == "kvferry-tcp-lane":
            if lane_threads:
                raise RuntimeError("can't start new thread")
            lane_threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    expect_copied(world, ROWS, Direction.READ)
    assert len(lane_threads) == 1


def test_a_stopped_client_ends_what_it_was_given(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "is_connected", True)
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        ended: SimpleQueue[Completion] = SimpleQueue()
        asked = PeerClient(PeerAddress("127.0.0.1", silent.getsockname()[1], b"", b""), ended.put, WAIT_S)
        asked.submit(transfer([100] * 8))
        accepted = [silent.accept()[0] for _ in range(NUM_LANES)]
        pool.submit(stop, asked).result(2 * WAIT_S)
        assert ended.get(timeout=WAIT_S).error == "over"
        for sock in accepted:
            sock.close()


def rows_of(world: World, rows: list[Row]) -> Copies:
    source = np.array([world.far.address(*row.source) for row in rows], np.uint64)
    target = np.array([world.near.address(*row.target) for row in rows], np.uint64)
    return Copies(source, target, np.array([row.length for row in rows], np.uint64), len(rows))


def client_of(world: World) -> PeerClient:
    transport = world.near.transport
    assert isinstance(transport, TcpTransport)
    return transport._peers["far"][0]


@pytest.fixture
def serving() -> Iterator[tuple[TcpTransport, np.ndarray]]:
    """A transport that serves 64 MiB, more than any socket's buffers hold."""
    transport = TcpTransport(stall_timeout_s=STALL_S)
    memory = np.random.default_rng(1).integers(0, 256, 64 * CHUNK_BYTES, np.uint8)
    transport.register(Memory(memory.ctypes.data, memory.nbytes, -1))
    yield transport, memory
    transport.close()


@pytest.fixture
def asking(serving: tuple[TcpTransport, np.ndarray]) -> Iterator[Callable[[list[tuple[int, int]]], socket.socket]]:
    """Asks for rows, (offset, length) each, and hands over the connection on which they come."""
    transport, memory = serving
    opened = []

    def ask(rows: list[tuple[int, int]]) -> socket.socket:
        descriptor = known(transport)
        sock = socket.create_connection(("127.0.0.1", descriptor.port), timeout=WAIT_S)
        opened.append(sock)
        challenge = challenged(sock)
        where = columns(*((memory.ctypes.data + offset, length) for offset, length in rows))
        sock.sendall(signed(frame(request(PROOF, "read", len(rows)), where), descriptor, challenge))
        header = sock.recv(8, socket.MSG_WAITALL)
        sock.recv(int.from_bytes(header[4:]), socket.MSG_WAITALL)
        return sock

    yield ask
    for sock in opened:
        sock.close()


@pytest.mark.parametrize("row_bytes", [100, 4096, 12_293, CHUNK_BYTES])
def test_rows_are_sent_as_they_lie_in_any_portions(serving, asking, row_bytes: int) -> None:
    _, memory = serving
    starts = np.random.default_rng(2).permutation(min(600, memory.nbytes // row_bytes)) * row_bytes
    sock = asking([(int(start), row_bytes) for start in starts])
    found = bytearray(row_bytes * len(starts))
    view, sizes = memoryview(found), np.random.default_rng(3)
    while view:
        view = view[sock.recv_into(view, min(len(view), int(sizes.integers(1, 300_000)))) :]
    assert found == b"".join(memory[start : start + row_bytes].tobytes() for start in starts.tolist())


def test_memory_is_unregistered_while_a_peer_takes_nothing(serving, asking) -> None:
    """Of what it had asked for it gets what was sent before, and no byte of what lies there now."""
    transport, memory = serving
    sock = asking([(first, CHUNK_BYTES) for first in range(0, memory.nbytes, CHUNK_BYTES)])
    before = memory.tobytes()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(transport.unregister, Memory(memory.ctypes.data, memory.nbytes, -1)).result(STALL_S)
    memory.fill(0)
    came = bytearray()
    with suppress(ConnectionError):
        while more := sock.recv(1 << 20):
            came += more
    assert len(came) < memory.nbytes
    assert before.startswith(bytes(came))


def test_a_peer_that_takes_nothing_of_long_rows_stalls(serving, asking) -> None:
    transport, memory = serving
    asking([(first, CHUNK_BYTES) for first in range(0, memory.nbytes, CHUNK_BYTES)])
    wait_for(lambda: serves_nobody(transport._server))
    assert not transport._server._idle


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_slow_peer_is_none_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    """Of a socket with a large buffer the kernel tells late that there is room: what it takes counts all the same."""
    memory = np.zeros(32 * CHUNK_BYTES, np.uint8)
    poll = select.poll
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:

        class Untold:
            def register(self, sock: socket.socket, events: int) -> None:
                self._poller = poll()
                self._poller.register(sock, events)

            def poll(self, limit_ms: float) -> list[tuple[int, int]]:
                while is_slow and not self._poller.poll(0):
                    other.recv(CHUNK_BYTES)
                return []

        monkeypatch.setattr(connection.select, "poll", Untold)
        sending = connection.Connection(listener.accept()[0], STALL_S)
        rows = RowStream(*(np.array([number], np.uint64) for number in (memory.ctypes.data, memory.nbytes)))
        with nullcontext() if is_slow else pytest.raises(TimeoutError, match="the peer took nothing for 2 s"):
            sending.send_rows(rows)
        sending.close()


def test_more_rows_than_one_call_takes_come_in_several() -> None:
    """In portions that cut rows, and to where they lie."""
    rng = np.random.default_rng(4)
    source = rng.integers(0, 256, 8 * CHUNK_BYTES, np.uint8)
    target = np.zeros_like(source)
    length = rng.integers(1, 600, 9 * MAX_VECTORS).astype(np.uint64)
    begin = np.cumsum(length) - length
    order = rng.permutation(len(length))
    sent, received = (RowStream(begin[order] + np.uint64(each.ctypes.data), length[order]) for each in (source, target))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        sending = connection.Connection(listener.accept()[0], STALL_S)
        receiving = connection.Connection(other, STALL_S)
        with ThreadPoolExecutor(1) as pool:
            all_sent = pool.submit(sending.send_rows, sent)
            receiving.receive_rows(received)
            all_sent.result(WAIT_S)
        sending.close()
    num_bytes = int(length.sum())
    assert np.array_equal(source[:num_bytes], target[:num_bytes])
    assert not target[num_bytes:].any()


@pytest.mark.parametrize("ends", [True, False])
def test_a_peer_of_which_nothing_more_comes_ends_the_wait(ends: bool) -> None:
    """Whether it has closed the connection or not."""
    memory = np.zeros(100, np.uint8)
    rows = RowStream(np.array([memory.ctypes.data], np.uint64), np.array([100], np.uint64))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        receiving = connection.Connection(listener.accept()[0], 0.2)
        other.sendall(b"\xff" * 99)
        if ends:
            other.shutdown(socket.SHUT_WR)
        error, what = (ConnectionResetError, "closed") if ends else (TimeoutError, r"the peer sent nothing for 0\.2 s")
        with pytest.raises(error, match=what):
            receiving.receive_rows(rows)
        receiving.close()
    assert memory.tolist() == [0xFF] * 99 + [0]


def test_a_peer_that_drips_is_as_stalled_as_one_that_sends_nothing() -> None:
    memory = np.zeros(CHUNK_BYTES, np.uint8)
    rows = RowStream(np.array([memory.ctypes.data], np.uint64), np.array([memory.nbytes], np.uint64))
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        receiving = connection.Connection(listener.accept()[0], 0.2)

        def drip() -> None:
            for number in range(len(memory)):
                wait_for(lambda number=number: is_over.is_set() or not number or memory[number - 1] == 1)
                if is_over.is_set():
                    return
                other.sendall(b"\x01")

        with ThreadPoolExecutor(1) as pool:
            dripping = pool.submit(drip)
            with pytest.raises(TimeoutError, match=r"the peer sent only \d+ bytes for 0\.2 s"):
                receiving.receive_rows(rows)
            is_over.set()
            dripping.result(WAIT_S)
        receiving.close()
    assert memory[0] == 1


@pytest.mark.parametrize(("piece_bytes", "is_slow"), [(PROGRESS_BYTES, True), (PROGRESS_BYTES // 32, False)])
def test_a_peer_that_sends_slowly_is_not_stalled(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, is_slow: bool
) -> None:
    """A chunk may take longer than the time limit, as where hundreds share a link; but not any time."""
    now = [0.0]
    monkeypatch.setattr(connection.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        receiving = connection.Connection(listener.accept()[0], STALL_S)

        def receive(done: int) -> int:
            now[0] += 0.4 * STALL_S
            return piece_bytes

        what = f"the peer sent only {3 * piece_bytes} bytes for {STALL_S:g} s"
        with nullcontext() if is_slow else pytest.raises(TimeoutError, match=what):
            receiving._receive_all(CHUNK_BYTES, receive)
        receiving.close()


def test_a_receiver_wakes_up_once_all_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the kernel has room for it; and afterwards for each byte, as a request may be short."""
    memory, marks = np.zeros(3000, np.uint8), []
    rows = RowStream(np.array([memory.ctypes.data], np.uint64), np.array([memory.nbytes], np.uint64))
    receive = io_vectors.receive
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        accepted = listener.accept()[0]
        receiving = connection.Connection(accepted, STALL_S)

        def half(fd: int, vectors: Vectors, flags: int) -> int:
            marks.append(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
            return receive(fd, RowStream(vectors[:, 0], np.minimum(vectors[:, 1], 1500)).rest(0), flags)

        monkeypatch.setattr(io_vectors, "receive", half)
        other.sendall(b"\x01" * len(memory))
        receiving.receive_rows(rows)
        marks.append(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
        receiving.close()
    assert marks == [3000, 1500, 1]
    assert memory.all()
