"""Rows that go straight between memory and a socket: in any portions, and never held while a peer is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.transport.registered_memory import Regions
from kvferry.transport.tcp.connection import CHUNK_BYTES, Connection, PendingRows
from kvferry.transport.tcp.row_stream import LONG_ROW_BYTES, RowStream
from kvferry.transport.tcp.server import RegistrationLock
from kvferry.transport.vectors import MAX_VECTORS, Vectors, vectors_of

STALL_S = 5.0
SHORT_STALL_S = 0.2


@contextmanager
def pair(stall_s: float = STALL_S) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection with buffers of a few KiB, and the other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client = socket.create_connection(server.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        with server.accept()[0] as other:
            connection = Connection(client, stall_s)
            try:
                yield connection, other
            finally:
                connection.close()


def stream(connection: Connection, memory: np.ndarray) -> RowStream:
    regions = Regions.of([(memory.ctypes.data, memory.nbytes)], [memory])
    return RowStream(connection, lambda: nullcontext(regions), "this process")


def rows_in(memory: np.ndarray, length: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of these lengths, in any order and with gaps."""
    start = (np.cumsum(length) - length + np.arange(len(length))).astype(np.uint64)
    order = np.random.default_rng(seed).permutation(len(length))
    return start[order] + np.uint64(memory.ctypes.data), length[order].astype(np.uint64)


def row_bytes(memory: np.ndarray, address: np.ndarray, length: np.ndarray) -> bytes:
    first = (address - np.uint64(memory.ctypes.data)).tolist()
    return b"".join(memory[a : a + n].tobytes() for a, n in zip(first, length.tolist(), strict=True))


lengths = st.lists(st.integers(1, 3 * LONG_ROW_BYTES), min_size=1, max_size=60)


@settings(deadline=None, max_examples=30)
@given(lengths, st.integers(0, 99), st.booleans())
def test_rows_arrive_where_they_belong_and_nowhere_else(sizes, seed, are_many):
    length = np.array(sizes * (40 if are_many else 1))
    room = int(length.sum()) + len(length)
    near, far = (np.random.default_rng(seed + each).integers(0, 256, room, np.uint8) for each in (1, 2))
    source, target = rows_in(near, length, seed), rows_in(far, length, seed)
    expected = far.copy()
    for (a, n), (b, _) in zip(zip(*source, strict=True), zip(*target, strict=True), strict=True):
        first, to = int(a) - near.ctypes.data, int(b) - far.ctypes.data
        expected[to : to + int(n)] = near[first : first + int(n)]
    with pair() as (connection, other), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(stream(connection, near).send, *source)
        stream(Connection(other, STALL_S), far).receive(*target)
        sent.result(STALL_S)
    assert np.array_equal(far, expected)


@given(lengths, st.data())
def test_what_is_pending_is_what_has_not_been_moved(sizes, data):
    length = np.array(sizes * 30, np.uint64)
    memory = np.arange(int(length.sum()), dtype=np.uint64).astype(np.uint8)
    address = (np.cumsum(length) - length).astype(np.uint64)
    pending, taken = PendingRows(vectors_of(address, length)), []
    while len(part := pending.next()):
        assert len(part) <= MAX_VECTORS
        taken.append(data.draw(st.integers(1, int(part[:, 1].sum())), "moved"))
        wanted = memory[sum(taken[:-1]) :][: int(part[:, 1].sum())].tobytes()
        assert b"".join(memory[int(a) : int(a) + int(n)].tobytes() for a, n in part) == wanted
        pending.advance(taken[-1])
        if len(taken) > 20:
            pending.advance(len(memory) - sum(taken))
    assert pending.num_moved == len(memory)


@pytest.mark.parametrize("is_sender", [True, False])
def test_memory_is_not_held_while_a_peer_is_waited_for(is_sender):
    memory, lock, called = np.zeros(64 * CHUNK_BYTES, np.uint8), RegistrationLock(), threading.Event()
    rows = vectors_of(*rows_in(memory, np.full(63, CHUNK_BYTES), 1))

    @contextmanager
    def hold(_: Vectors) -> Iterator[None]:
        with lock.shared():
            yield
        called.set()

    def change() -> None:
        with lock.exclusive():
            called.clear()

    with pair() as (connection, _), ThreadPoolExecutor(2) as pool:
        moved = pool.submit(connection.send_rows if is_sender else connection.receive_rows, rows, hold)
        assert called.wait(STALL_S)
        # The peer does nothing at all, so this side can only be waiting.
        pool.submit(change).result(STALL_S)
        connection.interrupt()
        with pytest.raises(OSError, match=r"closed|[Pp]ipe"):
            moved.result(STALL_S)


def test_rows_that_are_not_there_any_more_end_the_connection_in_its_middle():
    memory, calls = np.zeros(2 * CHUNK_BYTES, np.uint8), []
    address, length = rows_in(memory, np.full(16, CHUNK_BYTES // 16), 1)

    @contextmanager
    def lend() -> Iterator[Regions]:
        calls.append(1)
        yield Regions.of([(memory.ctypes.data, memory.nbytes)], [memory]) if len(calls) < 3 else Regions.of([(1, 1)])

    with pair() as (connection, other):
        other.sendall(bytes(100))
        rows = RowStream(connection, lend, "the serving process")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.sendall, bytes(CHUNK_BYTES))
            with pytest.raises(TransportError, match="outside the registered memory of the serving process"):
                rows.receive(address, length)
            other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_dripping", [True, False])
def test_a_peer_that_sends_nothing_or_too_little_stalls(is_dripping):
    memory = np.zeros(CHUNK_BYTES, np.uint8)
    address, length = rows_in(memory, np.full(8, 64 << 10), 1)
    over = threading.Event()
    with pair(SHORT_STALL_S) as (connection, other), ThreadPoolExecutor(1) as pool:

        def drip() -> None:
            while is_dripping and not over.wait(SHORT_STALL_S / 20):
                other.sendall(b"x")

        dripping = pool.submit(drip)
        try:
            with pytest.raises(TimeoutError, match=r"the peer sent nothing for 0\.2 s"):
                stream(connection, memory).receive(address, length)
        finally:
            over.set()
        dripping.result(STALL_S)


def test_a_peer_that_takes_nothing_stalls():
    memory = np.zeros(64 * CHUNK_BYTES, np.uint8)
    with pair(SHORT_STALL_S) as (connection, _), pytest.raises(TimeoutError, match=r"the peer took nothing for 0\.2 s"):
        stream(connection, memory).send(*rows_in(memory, np.full(63, CHUNK_BYTES), 1))


def test_a_peer_that_leaves_is_an_error():
    memory = np.zeros(CHUNK_BYTES, np.uint8)
    with pair() as (connection, other):
        other.sendall(bytes(5000))
        other.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            stream(connection, memory).receive(*rows_in(memory, np.full(2, 64 << 10), 1))
