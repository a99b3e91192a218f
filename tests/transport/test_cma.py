"""What is special about copying out of another process's memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.peer import PeerProcess, digest
from kvferry.testing.transports.world import finish
from kvferry.transport.base import Completion, Direction, Memory
from kvferry.transport.cma.transport import CALL_BYTES, CrossMemoryDescriptor, CrossMemoryTransport
from kvferry.transport.descriptors import Origin
from kvferry.transport.rowcopy.copy_queue import SLICE_BYTES
from kvferry.transport.selection.self_test import fill_probe

SIZE_BYTES = 24 << 20


@pytest.fixture
def transport():
    made = CrossMemoryTransport()
    yield made
    made.close()


def descriptor_of(memory: Memory) -> CrossMemoryDescriptor:
    owner = CrossMemoryTransport()
    owner.register(memory)
    described = msgspec.msgpack.decode(owner.descriptor(), type=CrossMemoryDescriptor)
    owner.close()
    return described


def memory_of(buffer) -> Memory:
    return Memory(int(buffer.ctypes.data), buffer.size, -1)


def one_row(source: int, target: int, length: int) -> Copies:
    return Copies(*(np.array([value], np.uint64) for value in (source, target, length)), 1)


def expect_refusal(transport: CrossMemoryTransport, descriptor: CrossMemoryDescriptor, match: str) -> None:
    with pytest.raises(TransportError, match=match):
        transport.connect("peer", msgspec.msgpack.encode(descriptor))


def test_who_is_not_there_is_refused(transport):
    known = descriptor_of(memory_of(np.zeros(100, np.uint8)))
    other = Origin("00000000-0000-0000-0000-000000000000", known.origin.pid_namespace)
    expect_refusal(transport, msgspec.structs.replace(known, origin=other), "found: boot id 00000000-")
    expect_refusal(transport, msgspec.structs.replace(known, pid=2**31 - 1), "has ended")
    expect_refusal(transport, msgspec.structs.replace(known, started=known.started + 1), "replaced by another process")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EMFILE, "cannot hold the process.*ulimit -n"), (errno.EPERM, "cannot hold the process.*may forbid")],
)
def test_what_this_process_cannot_do_is_not_said_of_its_peer(transport, monkeypatch, number, words):
    def refuse(pid):
        raise OSError(number, os.strerror(number))

    known = descriptor_of(memory_of(np.zeros(100, np.uint8)))
    monkeypatch.setattr(os, "pidfd_open", refuse)
    expect_refusal(transport, known, words)


def test_a_process_with_many_open_files_meets_peers(transport):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2048 open files, the limit is {hard}")
    memory = np.ones(100, np.uint8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with ExitStack() as files:
            for _ in range(1100):
                files.enter_context(Path(os.devnull).open())
            transport.connect("peer", msgspec.msgpack.encode(descriptor_of(memory_of(memory))))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_is_not_there_is_refused(transport):
    # The first page of a process is never mapped.
    known = descriptor_of(memory_of(np.zeros(100, np.uint8)))
    expect_refusal(
        transport, msgspec.structs.replace(known, regions=((8, 8),)), "does not let this process.*Bad address"
    )


def test_the_kernels_refusal_names_what_to_do(transport, monkeypatch):
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setitem(transport._calls, Direction.READ, refuse)
    known = descriptor_of(memory_of(np.zeros(100, np.uint8)))
    expect_refusal(transport, known, "Operation not permitted.*ptrace_scope")


def test_what_is_unmapped_during_a_read_is_an_error(transport):
    buffer = np.zeros(8192, np.uint8)
    gone = mmap.mmap(-1, 8192)
    source = np.frombuffer(gone, np.uint8)
    known = descriptor_of(memory_of(source))
    transport.register(memory_of(buffer))
    transport.connect("peer", msgspec.msgpack.encode(known))
    copies = one_row(int(source.ctypes.data), int(buffer.ctypes.data), 8192)
    del source
    gone.close()
    ticket = transport.post("peer", copies, Direction.READ)
    assert finish(transport, [ticket])[ticket].error == "Bad address"


def test_a_part_of_what_was_asked_for_is_an_error(transport):
    """The kernel copies the rows up to the first that it cannot, and calls that a success."""
    page = mmap.PAGESIZE
    buffer = np.zeros(2 * page, np.uint8)
    source = np.frombuffer(mmap.mmap(-1, 2 * page), np.uint8)
    known = descriptor_of(memory_of(source))
    transport.register(memory_of(buffer))
    transport.connect("peer", msgspec.msgpack.encode(known))
    # Swapped, so that they are two rows.
    near, far = int(buffer.ctypes.data), int(source.ctypes.data)
    rows = np.array([far, far + page]), np.array([near + page, near]), np.array([page, page])
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(far + page), ctypes.c_size_t(page), 0) == 0
    ticket = transport.post("peer", Copies(*(column.astype(np.uint64) for column in rows), 2), Direction.READ)
    assert finish(transport, [ticket])[ticket].error.startswith(f"{page} of {2 * page} bytes")


def test_a_long_ticket_is_copied_in_slices_and_does_not_hold_up_a_short_one(transport, monkeypatch):
    with PeerProcess("cma", SIZE_BYTES, 3) as peer:
        buffer = np.zeros(SIZE_BYTES + 8, np.uint8)
        transport.register(memory_of(buffer))
        transport.connect("peer", peer.descriptor)
        near, far = int(buffer.ctypes.data), peer.probe.address
        long = transport.post("peer", one_row(far, near, SIZE_BYTES), Direction.READ)
        short = transport.post("peer", one_row(far, near + SIZE_BYTES, 8), Direction.READ)
        assert SIZE_BYTES > SLICE_BYTES > CALL_BYTES
        monkeypatch.setattr(transport._queue._jobs[0], "quantum_bytes", 1)
        assert transport.poll() == [Completion(short, "")]
        assert transport.poll() == [Completion(long, "")]
        assert digest(buffer[:SIZE_BYTES]) == peer.digest()


def test_tickets_of_one_size_end_one_after_the_other(transport, monkeypatch):
    """A poll copies half of a ticket, a call a quarter; the poll after the last copy notices the end."""
    page = mmap.PAGESIZE
    monkeypatch.setattr("kvferry.transport.cma.transport.CALL_BYTES", page)
    monkeypatch.setattr("kvferry.transport.rowcopy.copy_queue.SLICE_BYTES", 2 * page)
    source, buffer = np.arange(4 * page, dtype=np.uint8), np.zeros(4 * page, np.uint8)
    known = descriptor_of(memory_of(source))
    transport.register(memory_of(buffer))
    transport.connect("peer", msgspec.msgpack.encode(known))
    copies = one_row(int(source.ctypes.data), int(buffer.ctypes.data), 4 * page)
    tickets = [transport.post("peer", copies, Direction.READ) for _ in range(3)]
    ended = [transport.poll() for _ in range(7)]
    assert [completion.ticket for some in ended for completion in some] == tickets
    assert [len(some) for some in ended] == [0, 0, 1, 0, 1, 0, 1]
    assert np.array_equal(source, buffer)


@pytest.mark.parametrize("direction", Direction)
def test_a_process_that_has_ended_is_an_error_in_both_directions(transport, direction):
    buffer = np.zeros(4096, np.uint8)
    transport.register(memory_of(buffer))
    with PeerProcess("cma", 4096, 3) as peer:
        transport.connect("peer", peer.descriptor)
        sides = (peer.probe.address, int(buffer.ctypes.data))
        ticket = transport.post(
            "peer", one_row(*(sides if direction == Direction.READ else sides[::-1]), 4096), direction
        )
        peer.kill()
        assert "has ended" in finish(transport, [ticket])[ticket].error


def test_bytes_of_a_process_that_ended_after_the_copy_do_not_count(transport, monkeypatch):
    """Its id may have come to name another process in between."""
    buffer = np.zeros(4096, np.uint8)
    transport.register(memory_of(buffer))
    with PeerProcess("cma", 4096, 3) as peer:
        transport.connect("peer", peer.descriptor)
        call = transport._calls[Direction.READ]

        def copy_and_end(*arguments: object) -> int:
            copied = call(*arguments)
            peer.kill()
            return copied

        monkeypatch.setitem(transport._calls, Direction.READ, copy_and_end)
        ticket = transport.post("peer", one_row(peer.probe.address, int(buffer.ctypes.data), 4096), Direction.READ)
        assert "has ended" in finish(transport, [ticket])[ticket].error
        expected = np.empty(4096, np.uint8)
        fill_probe(expected, 3)
        assert np.array_equal(buffer, expected)
