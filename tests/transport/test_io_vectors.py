"""Rows as the kernel takes them, against bytes that are put together one by one."""

from __future__ import annotations

import ctypes
import errno
import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transport import io_vectors
from kvferry.transport.io_vectors import MAX_VECTORS, RowStream


def stream_of(memory: np.ndarray, begin: list[int], length: list[int]) -> RowStream:
    return RowStream(np.array(begin, np.uint64) + np.uint64(memory.ctypes.data), np.array(length, np.uint64))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_what_is_left_of_rows_are_their_last_bytes(lengths: list[int], data: st.DataObject) -> None:
    memory = np.arange(200, dtype=np.uint8)
    begin = [data.draw(st.integers(0, 190)) for _ in lengths]
    rows = stream_of(memory, begin, lengths)
    whole = b"".join(memory[a : a + n].tobytes() for a, n in zip(begin, lengths, strict=True))
    skip = data.draw(st.integers(0, len(whole) - 1))
    assert rows.num_bytes == len(whole)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert io_vectors.send(ours.fileno(), rows.rest(skip), 0) == len(whole) - skip
        assert theirs.recv(1000) == whole[skip:]
        # What was left out of one call is there in the next.
        assert rows.rest(0)[:, 1].tolist() == lengths


def test_one_call_has_no_more_rows_than_the_kernel_takes() -> None:
    memory = np.zeros(1, np.uint8)
    rows = stream_of(memory, [0] * (2 * MAX_VECTORS + 1), [1] * (2 * MAX_VECTORS + 1))
    assert [len(rows.rest(moved)) for moved in (0, MAX_VECTORS + 1, 2 * MAX_VECTORS)] == [MAX_VECTORS, MAX_VECTORS, 1]
    assert os.sysconf("SC_IOV_MAX") >= MAX_VECTORS


def test_a_signal_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own calls go on as well."""
    receive, results = io_vectors._RECEIVE, [-1, -1]

    def disturbed(*arguments: object) -> int:
        ctypes.set_errno(errno.EINTR)
        return results.pop() if results else receive(*arguments)

    monkeypatch.setattr(io_vectors, "_RECEIVE", disturbed)
    memory = np.zeros(8, np.uint8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"8 bytes.")
        assert io_vectors.receive(theirs.fileno(), stream_of(memory, [0], [8]).rest(0), socket.MSG_WAITALL) == 8
    assert memory.tobytes() == b"8 bytes."


def test_memory_that_is_not_there_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    rows = RowStream(np.array([4096], np.uint64), np.array([64], np.uint64))
    with ours, theirs, pytest.raises(OSError, match="Bad address"):
        io_vectors.send(ours.fileno(), rows.rest(0), 0)
    with socket.socket() as alone, pytest.raises(BrokenPipeError):
        io_vectors.send(alone.fileno(), stream_of(np.zeros(1, np.uint8), [0], [1]).rest(0), 0)
