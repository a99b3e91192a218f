"""Transport between processes of one host: attach the peer's memory and copy in `poll`, without a daemon.

The peer's memory is reached through /proc/<pid>/fd/<fd>, so nothing has a name in a file system and nothing is left
behind when a process is killed. Attached memory can be touched after the peer has died or unregistered it, like memory
reached over RDMA: the lease says whether its bytes are current, not the transport. `poll` finds out that a peer has
closed all of it or has died, and unmaps it: a restarted peer needs that memory.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.system import hint_for, os_error_text
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.descriptors import Natural, Origin, check_same, check_size, decode, origin_here
from kvferry.transport.posting import Posting, connected
from kvferry.transport.registered_memory import MAX_REGIONS, Regions, Registry, View
from kvferry.transport.rowcopy.copy_queue import CopyQueue
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared, check_sealed

__all__ = ["SharedMemory", "SharedMemoryTransport", "allocate_shared"]

CHECK_INTERVAL_S = 1.0
"""How often `poll` looks whether peers are still alive."""


class SharedRegion(msgspec.Struct, frozen=True, array_like=True):
    """One attachable region: the descriptor number in the owner's process and what must be found behind it."""

    fd: Natural
    inode: Natural
    device: Natural
    address: Natural
    size_bytes: Natural


class SharedDescriptor(msgspec.Struct, frozen=True, tag="shm-1"):
    """What a peer needs to attach."""

    origin: Origin
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    regions: Annotated[tuple[SharedRegion, ...], Meta(max_length=MAX_REGIONS)] = msgspec.field(name="pieces")


_DECODER: Final = msgspec.msgpack.Decoder(SharedDescriptor)


@dataclass(frozen=True, slots=True, eq=False)
class _Attached:
    """A peer's memory, as it was described and as it is seen here."""

    shared: SharedDescriptor
    regions: Regions

    @property
    def exists(self) -> bool:
        """Whether the peer still has any of it open, as far as can be told."""
        regions = self.shared.regions
        return not regions or any(_exists(self.shared.pid, region) for region in regions)


class SharedMemoryTransport:
    """Copies between the memory of two processes of one host, in `poll`, 16 MiB at a time.

    Memory without `shared_fd` can be registered too: it is the local side of copies, and then nothing can be offered.
    Raises TransportError when this host does not say which kernel and pid namespace it runs.
    """

    name = "shm"
    copies_once = True
    progress_interval_s = float("inf")

    def __init__(self) -> None:
        self._origin = origin_here()
        self._registry = Registry()
        self._peers: dict[str, _Attached] = {}
        self._queue = CopyQueue()
        self._check_at = 0.0
        self._unmapping: list[threading.Thread] = []

    def register(self, memory: Memory) -> None:
        """Raises TransportError when `shared_fd` is not a sealed memfd or the memory overlaps registered memory."""
        if memory.shared_fd >= 0:
            check_sealed(memory.shared_fd)
        self._registry.add(memory)

    def unregister(self, memory: Memory) -> None:
        """Raises TransportError when it is not registered. Peers that have attached it stay attached."""
        self._registry.remove(memory)

    def descriptor(self) -> bytes:
        """Raises TransportError when there are more regions than a peer accepts, and when some memory is private: peers
        would find a part of it only when they need it."""
        self._registry.check_describable()
        private = [memory for memory in self._registry.memories if memory.shared_fd < 0]
        if private:
            raise TransportError(
                "peers cannot reach this engine's memory through shared memory",
                found=f"{sum(memory.size_bytes for memory in private):,} private bytes",
                expected="memory that was allocated to be shared",
            )
        regions = tuple(_describe(memory) for memory in self._registry.memories)
        return check_size(msgspec.msgpack.encode(SharedDescriptor(self._origin, os.getpid(), regions)))

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Attach the peer's memory. Raises TransportError with the reason when that is impossible."""
        self.disconnect(peer)
        shared = decode(peer, descriptor, _DECODER)
        check_same(peer, shared.origin, self._origin)
        views = [_attach(peer, shared.pid, region) for region in shared.regions]
        regions = Regions.of([(region.address, region.size_bytes) for region in shared.regions], views)
        self._peers[peer] = _Attached(shared, regions)

    def carriers(self, peer: str) -> tuple[str, ...]:
        return (self.name,)

    def disconnect(self, peer: str) -> None:
        self._queue.drop(lambda job: job.peer == peer, f"peer {peer!r} was disconnected")
        self._unmap([peer] if peer in self._peers else [])

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected or a row leaves registered memory."""
        remote = connected(self._peers, peer).regions
        return self._queue.add(Posting(peer, self._registry.regions, remote, copies, direction))

    def view(self, peer: str, address: int, num_bytes: int) -> View | None:
        """The bytes of a connected peer at one of its addresses, mapped as long as the view lives; None where it has
        none there."""
        attached = self._peers.get(peer)
        if attached is None or not num_bytes:
            return None
        try:
            side = attached.regions.located(
                np.array([address], np.uint64), np.array([num_bytes], np.uint64), f"peer {peer!r}"
            )
        except TransportError:
            return None
        (view,), (first,) = side.views, side.view_offsets.tolist()
        return view[first : first + num_bytes]

    def cancel(self, ticket: Ticket) -> None:
        self._queue.drop(lambda job: job.ticket == ticket, "cancelled")

    def poll(self) -> list[Completion]:
        if self._check_at <= (now := time.monotonic()):
            self._check_at = now + CHECK_INTERVAL_S
            # Copies that are under way keep their views, and end well.
            self._unmap([peer for peer, attached in self._peers.items() if not attached.exists])
        return self._queue.run()

    def moved(self, peer: str) -> int:
        return self._queue.num_moved

    def close(self) -> None:
        self._queue.drop(lambda job: True, "this transport was closed")
        self._peers.clear()
        self._registry.clear()
        for thread in self._unmapping:
            thread.join()

    def _unmap(self, peers: Sequence[str]) -> None:
        """Unmap the memory of peers once no copy uses it. Closing a mapping with views would raise.

        Unmapping gigabytes takes as long as copying them, and peers would miss this process's heartbeats. So a thread
        does it, which must hold the last reference.
        """
        if not peers:
            return
        dropped = [self._peers.pop(peer) for peer in peers]
        thread = threading.Thread(target=dropped.clear, name="kvferry-unmap", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No more threads in this process: it has to wait.
            dropped.clear()
        else:
            self._unmapping = [thread, *(each for each in self._unmapping if each.is_alive())]


def _describe(memory: Memory) -> SharedRegion:
    status = os.fstat(memory.shared_fd)
    return SharedRegion(memory.shared_fd, status.st_ino, status.st_dev, memory.address, memory.size_bytes)


def _attach(peer: str, pid: int, region: SharedRegion) -> View:
    path = f"/proc/{pid}/fd/{region.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"cannot open the memory of peer {peer!r}",
            found=f"{path}: {error.strerror}",
            hint=hint_for(error, "run both processes as the same user; use tcp if that is not possible"),
        ) from error
    try:
        _check_identity(peer, os.fstat(fd), region)
        check_sealed(fd)
        return np.frombuffer(mmap.mmap(fd, region.size_bytes), np.uint8)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot map the memory of peer {peer!r}", found=os_error_text(error)) from error
    finally:
        os.close(fd)


def _exists(pid: int, region: SharedRegion) -> bool:
    try:
        status = os.stat(f"/proc/{pid}/fd/{region.fd}")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return (status.st_ino, status.st_dev) == (region.inode, region.device)


def _check_identity(peer: str, status: os.stat_result, region: SharedRegion) -> None:
    """A process id can be taken by another process: what is behind it must be the very file that was described."""
    found: Sequence[int] = (status.st_ino, status.st_dev)
    if tuple(found) != (region.inode, region.device) or status.st_size < region.size_bytes:
        raise TransportError(
            f"the memory of peer {peer!r} is not what it described",
            found=f"inode {status.st_ino}, device {status.st_dev}, {status.st_size} bytes",
            expected=f"inode {region.inode}, device {region.device}, at least {region.size_bytes} bytes",
            hint="the peer has ended or restarted: connect with its new descriptor",
        )
