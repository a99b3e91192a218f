"""Transport between processes of one host by cross-memory attach: the kernel copies between their address spaces.

Any memory will do, also what an engine has allocated for itself, and the peer has no part in a copy: it may compute,
sleep or hang meanwhile. One system call copies up to a thousand rows. The kernel asks for the permission to trace the
peer: as a rule, the same user and no stricter `kernel.yama.ptrace_scope` than 0.

A process id may come to name another process once its owner has ended. So a pidfd holds every peer, is asked before
each call whether the process is alive, and a copy counts only when it still is afterwards. No call takes a pidfd
itself: what is written to a process that got the id between that question and the call lands in its memory.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.system import hint_for, os_error_text
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.descriptors import Natural, Origin, check_same, check_size, decode, origin_here
from kvferry.transport.io_vectors import MAX_VECTORS, Vectors, vectors_of
from kvferry.transport.posting import Posting, connected
from kvferry.transport.registered_memory import MAX_REGIONS, Regions, Registry
from kvferry.transport.rowcopy.copy_queue import CopyQueue

# One call copies no more bytes than this, and no row is longer.
CALL_BYTES: Final = 4 << 20
START_FIELD: Final = 19
"""The field of /proc/<pid>/stat that says when a process was started, counted from behind the command's name."""


class CrossMemoryDescriptor(msgspec.Struct, frozen=True, tag="cma-1"):
    """What a peer needs: which process, and what of its memory."""

    origin: Origin
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Natural
    regions: Annotated[tuple[tuple[Natural, Natural], ...], Meta(max_length=MAX_REGIONS)] = msgspec.field(name="pieces")


_DECODER: Final = msgspec.msgpack.Decoder(CrossMemoryDescriptor)


@dataclass(frozen=True, slots=True)
class _Peer:
    """A process, held by `pidfd`, and its registered regions."""

    pid: int
    pidfd: int
    regions: Regions

    def check_alive(self) -> None:
        """Raises TransportError unless `pid` still names the process that `pidfd` holds."""
        # Not `select.select`, which cannot name a descriptor beyond 1023: a server with many clients has more.
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if poller.poll(0):
            raise TransportError(f"process {self.pid} has ended")


_Call = Callable[..., int]


class CrossMemoryTransport:
    """Copies between the memory of two processes of one host, in `poll`, 16 MiB at a time.

    Raises TransportError where the kernel has no such call.
    """

    name = "cma"
    copies_once = True
    progress_interval_s = float("inf")

    def __init__(self) -> None:
        self._origin = origin_here()
        self._started = _start_time(os.getpid())
        self._calls = {Direction.READ: _call("process_vm_readv"), Direction.WRITE: _call("process_vm_writev")}
        self._registry = Registry()
        self._peers: dict[str, _Peer] = {}
        self._queue = CopyQueue()

    def register(self, memory: Memory) -> None:
        """Raises TransportError when the memory overlaps registered memory."""
        self._registry.add(memory)

    def unregister(self, memory: Memory) -> None:
        """Raises TransportError when it is not registered. Connected peers can still reach it."""
        self._registry.remove(memory)

    def descriptor(self) -> bytes:
        """Raises TransportError when there are more regions than a peer accepts."""
        self._registry.check_describable()
        known = CrossMemoryDescriptor(self._origin, os.getpid(), self._started, self._registry.extents)
        return check_size(msgspec.msgpack.encode(known))

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError when the peer lives elsewhere, has ended, or may not be read by this user."""
        self.disconnect(peer)
        known = decode(peer, descriptor, _DECODER)
        check_same(peer, known.origin, self._origin)
        regions = Regions.of(known.regions)
        opened = _Peer(known.pid, _open_pidfd(peer, known), regions)
        try:
            self._try_to_read(peer, opened)
        except BaseException:
            os.close(opened.pidfd)
            raise
        self._peers[peer] = opened

    def carriers(self, peer: str) -> tuple[str, ...]:
        return (self.name,)

    def disconnect(self, peer: str) -> None:
        self._queue.drop(lambda job: job.peer == peer, f"peer {peer!r} was disconnected")
        if known := self._peers.pop(peer, None):
            os.close(known.pidfd)

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected or a row leaves registered memory."""
        known = connected(self._peers, peer)
        posting = Posting(peer, self._registry.regions, known.regions, copies, direction)
        local, remote, length = posting.columns(CALL_BYTES)
        return self._queue.submit(
            peer, self._copy(known, direction, vectors_of(local, length), vectors_of(remote, length))
        )

    def cancel(self, ticket: Ticket) -> None:
        self._queue.drop(lambda job: job.ticket == ticket, "cancelled")

    def poll(self) -> list[Completion]:
        return self._queue.run()

    def moved(self, peer: str) -> int:
        return self._queue.num_moved

    def close(self) -> None:
        self._queue.drop(lambda job: True, "this transport was closed")
        for name in list(self._peers):
            self.disconnect(name)
        self._registry.clear()

    def _copy(self, peer: _Peer, direction: Direction, local: Vectors, remote: Vectors) -> Iterator[int]:
        """Copy the rows, one call for each step; yields the bytes of a step. Raises TransportError when a call fails,
        or brings less than it was asked for."""
        call, first = self._calls[direction], 0
        while first < len(local):
            part = slice(first, first + _num_rows(local[first : first + MAX_VECTORS, 1]))
            first = part.stop
            if direction is Direction.WRITE:
                peer.check_alive()
            copied = _copied(call, peer, local[part], remote[part])
            peer.check_alive()
            if copied != (wanted := int(local[part, 1].sum())):
                raise TransportError(f"{copied} of {wanted} bytes: the rest of the peer's memory is gone")
            yield copied

    def _try_to_read(self, name: str, peer: _Peer) -> None:
        """Read one byte: that tells whether the kernel allows it."""
        if not len(peer.regions.address):
            return
        scratch = np.zeros(1, np.uint8)
        length = np.ones(1, np.uint64)
        local = vectors_of(np.array([scratch.ctypes.data], np.uint64), length)
        remote = vectors_of(peer.regions.address[:1], length)
        try:
            for _ in self._copy(peer, Direction.READ, local, remote):
                pass
        except TransportError as error:
            raise TransportError(
                f"the kernel does not let this process read the memory of peer {name!r}",
                found=f"process {peer.pid}: {error.what}",
                hint="run both as the same user and set kernel.yama.ptrace_scope to 0, or use shm, tcp or nixl",
            ) from error


def _copied(call: _Call, peer: _Peer, local: Vectors, remote: Vectors) -> int:
    """Make one call; the number of bytes that it copied. Raises TransportError when the kernel refuses."""
    copied = int(call(peer.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))
    if copied < 0:
        # The error of the call, not of what is asked about the process afterwards.
        error = os.strerror(ctypes.get_errno())
        peer.check_alive()
        raise TransportError(error)
    return copied


def _num_rows(length: NDArray[np.uint64]) -> int:
    """How many rows, one at least, hold no more than a call's bytes."""
    return max(1, int(np.searchsorted(np.cumsum(length), CALL_BYTES, side="right")))


def _call(name: str) -> _Call:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        call = library[name]
    except AttributeError as error:
        raise TransportError(
            "this system cannot copy between processes", found=f"no {name}", expected="Linux"
        ) from error
    if ctypes.sizeof(ctypes.c_void_p) != np.dtype(np.uint64).itemsize:
        raise TransportError("copying between processes needs 64-bit addresses")
    call.restype = ctypes.c_ssize_t
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    return call


def _start_time(pid: int) -> int:
    """When a process was started, in the kernel's ticks. Together with its id that identifies it for good."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name comes in parentheses and may hold anything.
            return int(file.read().rpartition(")")[2].split()[START_FIELD])
    except OSError as error:
        raise TransportError(f"process {pid} cannot be found", found=os_error_text(error)) from error


def _open_pidfd(name: str, known: CrossMemoryDescriptor) -> int:
    """A pidfd of the very process that was described."""
    try:
        pidfd = os.pidfd_open(known.pid)
    except ProcessLookupError as error:
        raise TransportError(f"peer {name!r} has ended", found=f"process {known.pid}: {error.strerror}") from error
    except OSError as error:
        hint = hint_for(error, "a container or a sandbox may forbid pidfd_open: use shm, nixl or tcp")
        found = f"process {known.pid}: {error.strerror}"
        raise TransportError(f"cannot hold the process of peer {name!r}", found=found, hint=hint) from error
    try:
        started = _start_time(known.pid)
        if started != known.started:
            raise TransportError(
                f"the process of peer {name!r} has been replaced by another process",
                found=f"process {known.pid} started at {started}",
                expected=f"started at {known.started}",
                hint="the peer has ended or restarted: connect with its new descriptor",
            )
    except TransportError:
        os.close(pidfd)
        raise
    return pidfd
