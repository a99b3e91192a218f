"""What is special about memory shared between processes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from weakref import finalize

import msgspec
import numpy as np
import pytest
from unmapping import wait_for_unmapping

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import NOTHING, Direction
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.base import Completion, Memory
from kvferry.transport.descriptors import Origin
from kvferry.transport.machine.host_memory import HostMemory
from kvferry.transport.shm import shared_memory
from kvferry.transport.shm import transport as shm
from kvferry.transport.shm.transport import (
    SharedDescriptor,
    SharedMemoryTransport,
    SharedRegion,
    allocate_shared,
)


def described(descriptor: bytes) -> SharedDescriptor:
    return msgspec.msgpack.decode(descriptor, type=SharedDescriptor)


@pytest.fixture
def descriptor():
    owner, shared = SharedMemoryTransport(), allocate_shared(10_000, "test")
    owner.register(shared.memory)
    yield described(owner.descriptor())
    owner.close()
    shared.close()


def expect_refusal(descriptor: SharedDescriptor, match: str) -> None:
    transport = SharedMemoryTransport()
    with pytest.raises(TransportError, match=match):
        transport.connect("peer", msgspec.msgpack.encode(descriptor))
    transport.close()


def test_another_kernel_or_namespace_is_named(descriptor: SharedDescriptor) -> None:
    other = Origin("00000000-0000-0000-0000-000000000000", descriptor.origin.pid_namespace)
    expect_refusal(msgspec.structs.replace(descriptor, origin=other), "found: boot id 00000000-")
    other = Origin(descriptor.origin.boot_id, 12345)
    expect_refusal(msgspec.structs.replace(descriptor, origin=other), "pid namespace 12345")


def test_a_process_or_file_that_is_not_there_is_named(descriptor: SharedDescriptor) -> None:
    expect_refusal(msgspec.structs.replace(descriptor, pid=2**31 - 1), "No such file")
    (piece,) = descriptor.regions
    expect_refusal(with_region(descriptor, msgspec.structs.replace(piece, fd=9999)), "fd/9999: No such file")


def test_a_reused_process_id_is_noticed(descriptor: SharedDescriptor) -> None:
    (piece,) = descriptor.regions
    for changed in ({"inode": piece.inode + 1}, {"device": piece.device + 1}, {"size_bytes": 20_000}):
        other = msgspec.structs.replace(piece, **changed)
        expect_refusal(with_region(descriptor, other), "not what it described")


def test_memory_that_could_shrink_is_refused(descriptor: SharedDescriptor) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    status = os.fstat(fd)
    transport = SharedMemoryTransport()
    with pytest.raises(TransportError, match="not sealed"):
        transport.register(Memory(1 << 20, 4096, fd))
    transport.close()
    piece = SharedRegion(fd, status.st_ino, status.st_dev, 1 << 20, 4096)
    expect_refusal(with_region(descriptor, piece), "not sealed")
    os.close(fd)


def test_a_file_that_is_no_memfd_is_refused(tmp_path: Path, descriptor: SharedDescriptor) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDWR)
    status = os.fstat(fd)
    piece = SharedRegion(fd, status.st_ino, status.st_dev, 1 << 20, 4096)
    expect_refusal(with_region(descriptor, piece), r"not a memfd|not sealed")
    os.close(fd)


def test_private_memory_cannot_be_offered() -> None:
    """Else a peer would take this transport after a self-test in other memory, and fail at the first cache."""
    transport = SharedMemoryTransport()
    buffer = np.zeros(100, np.uint8)
    transport.register(Memory(int(buffer.ctypes.data), 100, -1))
    with pytest.raises(TransportError, match="100 private bytes"):
        transport.descriptor()
    transport.close()


def test_shared_memory_closes_while_it_is_looked_at() -> None:
    shared = allocate_shared(mmap.PAGESIZE, "test")
    view = np.frombuffer(shared.buffer, np.uint8)
    view[:] = 3
    shared.close()
    shared.close()
    assert (view == 3).all()


def test_shared_memory_needs_a_size() -> None:
    for size in (0, -1, 1 << 60):
        with pytest.raises(TransportError):
            allocate_shared(size, "test")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (HostMemory(1 << 30, 4095), "not enough memory.*4,095 bytes available"),
        (HostMemory(), "how much memory there is"),
    ],
)
def test_no_more_is_taken_than_there_is(monkeypatch: pytest.MonkeyPatch, found: HostMemory, words: str) -> None:
    """The kernel would kill somebody in a container for it."""
    monkeypatch.setattr(shared_memory, "host_memory", lambda: found)
    with pytest.raises(TransportError, match=words):
        allocate_shared(4096, "test")


def test_without_a_descriptor_left_nobody_else_is_blamed(
    monkeypatch: pytest.MonkeyPatch, descriptor: SharedDescriptor
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(TransportError, match=r"cannot allocate.*Too many open files.*ulimit -n"):
        allocate_shared(4096, "test")
    monkeypatch.setattr(os, "open", refuse)
    expect_refusal(descriptor, "Too many open files.*ulimit -n")


def test_nothing_is_left_behind_by_a_killed_peer() -> None:
    transport, num_fds = SharedMemoryTransport(), len(os.listdir("/proc/self/fd"))
    with PeerProcess("shm", 4096, 1) as peer:
        transport.connect("peer", peer.descriptor)
        peer.kill()
    # Other programs come and go there.
    assert not [name for name in os.listdir("/dev/shm") if "kvferry" in name]
    transport.disconnect("peer")
    transport.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds
    with pytest.raises(TransportError, match="No such file"):
        transport.connect("peer", peer.descriptor)


def num_mapped(name: str) -> int:
    wait_for_unmapping()
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_memory_of_a_process_that_has_ended_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CHECK_INTERVAL_S", 0.0)
    transport = SharedMemoryTransport()
    with PeerProcess("shm", 4096, 1) as peer:
        transport.connect("peer", peer.descriptor)
        assert transport.poll() == []
        view = transport.view("peer", peer.probe.address, 10)
        assert view is not None
        peer.kill()
        assert transport.poll() == []
    assert num_mapped("kvferry-peer") == 1
    assert transport.view("peer", peer.probe.address, 10) is None
    # Who was using it has it until then.
    view[:] = 1
    del view
    assert num_mapped("kvferry-peer") == 0
    with pytest.raises(TransportError, match="not connected"):
        transport.post("peer", NOTHING, Direction.READ)
    transport.close()


Both = tuple[SharedMemoryTransport, SharedMemoryTransport]


@pytest.fixture
def both() -> Iterator[Both]:
    """A transport, and that of the peer whose memory it sees."""
    made = SharedMemoryTransport(), SharedMemoryTransport()
    yield made
    for each in made:
        each.close()


def test_to_unmap_memory_keeps_nobody_waiting_while_there_are_threads(
    monkeypatch: pytest.MonkeyPatch, both: Both
) -> None:
    unmapped_by, gone = [], threading.Event()
    (transport, owner), shared = both, allocate_shared(4096, "test")
    owner.register(shared.memory)
    for is_refused in (False, True):
        transport.connect("peer", owner.descriptor())
        view = transport.view("peer", shared.memory.address, 1)
        assert view is not None
        # The memory goes when the last view does.
        finalize(view.base, lambda: (unmapped_by.append(threading.current_thread().name), gone.set()))
        del view
        if is_refused:
            monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        transport.disconnect("peer")
        assert gone.wait(10.0)
        gone.clear()
    monkeypatch.undo()
    assert unmapped_by == ["kvferry-unmap", threading.current_thread().name]
    shared.close()


def test_memory_of_a_living_peer_stays_as_long_as_any_of_it_is_there(
    monkeypatch: pytest.MonkeyPatch, both: Both
) -> None:
    monkeypatch.setattr(shm, "CHECK_INTERVAL_S", 0.0)
    transport, owner = both
    pieces = [allocate_shared(4096, name) for name in ("first", "second")]
    for piece in pieces:
        owner.register(piece.memory)
    descriptor, addresses = owner.descriptor(), [piece.memory.address for piece in pieces]
    transport.connect("peer", descriptor)
    for piece, is_seen in zip(pieces, (True, False), strict=True):
        piece.close()
        transport.poll()
        assert all((transport.view("peer", address, 1) is not None) is is_seen for address in addresses)


def test_a_peer_without_memory_is_not_taken_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch, both: Both) -> None:
    monkeypatch.setattr(shm, "CHECK_INTERVAL_S", 0.0)
    transport, owner = both
    transport.connect("peer", owner.descriptor())
    assert transport.poll() == []
    ticket = transport.post("peer", NOTHING, Direction.READ)
    assert transport.poll() == [Completion(ticket, "")]


@pytest.mark.parametrize("what", ["another file", "nothing that is seen"])
def test_what_is_behind_a_descriptor_now_is_looked_at(what: str, monkeypatch: pytest.MonkeyPatch, both: Both) -> None:
    monkeypatch.setattr(shm, "CHECK_INTERVAL_S", 0.0)
    (transport, owner), shared = both, allocate_shared(4096, "test")
    owner.register(shared.memory)
    transport.connect("peer", owner.descriptor())
    if what == "another file":
        with Path("/dev/null").open("rb") as other:
            os.dup2(other.fileno(), shared.memory.shared_fd)
    else:
        monkeypatch.setattr(shm.os, "stat", Mock(side_effect=PermissionError))
    transport.poll()
    # Who may not look does not know.
    assert (transport.view("peer", shared.memory.address, 1) is None) is (what == "another file")
    monkeypatch.undo()
    shared.close()


def test_peers_are_not_looked_for_at_every_poll(monkeypatch: pytest.MonkeyPatch, both: Both) -> None:
    monkeypatch.setattr(shm, "CHECK_INTERVAL_S", 3600.0)
    transport, owner = both
    transport.poll()
    shared = allocate_shared(4096, "test")
    owner.register(shared.memory)
    address = shared.memory.address
    transport.connect("peer", owner.descriptor())
    shared.close()
    transport.poll()
    assert transport.view("peer", address, 1) is not None


def with_region(descriptor: SharedDescriptor, piece: SharedRegion) -> SharedDescriptor:
    return msgspec.structs.replace(descriptor, regions=(piece,))


def test_memory_of_a_peer_is_seen_where_it_is_and_nowhere_else() -> None:
    owner, shared = SharedMemoryTransport(), allocate_shared(10_000, "test")
    owner.register(shared.memory)
    here, start = SharedMemoryTransport(), shared.memory.address
    assert here.view("peer", start, 1) is None
    here.connect("peer", owner.descriptor())
    view = here.view("peer", start + 100, 50)
    assert view is not None
    shared.buffer[100:150] = bytes(range(50))
    assert bytes(view) == bytes(range(50))
    view[:] = 7
    assert set(shared.buffer[100:150]) == {7}
    outside = [
        (start - 1, 2),
        (start + 9_990, 11),
        (start + 10_000, 1),
        (start, 0),
        (0, 1),
        (start, 1 << 63),
        ((1 << 64) - 1, 1),
    ]
    assert [here.view("peer", address, size) for address, size in outside] == [None] * len(outside)
    assert here.view("peer", start, 0) is None
    here.disconnect("peer")
    assert here.view("peer", start, 1) is None
    # Whoever still has it can go on writing.
    view[:] = 8
    assert set(shared.buffer[100:150]) == {8}
    here.close()
    owner.close()
    shared.close()
