"""Transport between processes of one host by cross-memory attach: the kernel copies straight out of the peer's memory.

Any memory will do, also what an engine has allocated for itself, and the peer has no part in a copy: it may compute,
sleep or hang meanwhile. One system call copies up to a thousand rows. The kernel asks for the permission to trace the
peer: as a rule, the same user and no stricter `kernel.yama.ptrace_scope` than 0.

A process id may come to name another process once its owner has ended. So every peer is held by a pidfd, it is looked
at before each call, and a copy counts only when its owner was still alive after it. No call takes a pidfd itself: what
is written between the look and the call to a process that has just got the id of one that ended lands there.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies, split
from kvferry.system.os_errors import os_error_text
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.descriptor_codec import Natural, check_size, decode
from kvferry.transport.process_identity import Origin, check_same, origin_here
from kvferry.transport.registered_memory import Pieces, Registry
from kvferry.transport.rowcopy.copy_queue import TURN_BYTES

# One poll copies about this much: a few milliseconds.
SLICE_BYTES: Final = 16 << 20
# The kernel takes no more rows in one call.
MAX_ROWS: Final = 1024
# Nor more bytes than this are copied in one call; a row neither.
CALL_BYTES: Final = 4 << 20
START_FIELD: Final = 19
"""Of /proc/<pid>/stat, counted from behind the command's name: when the process was started."""

Vectors = NDArray[np.uint64]


class CrossMemoryDescriptor(msgspec.Struct, frozen=True, tag="cma-1"):
    """What a peer needs: which process, and what of its memory."""

    origin: Origin
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Natural
    pieces: Annotated[tuple[tuple[Natural, Natural], ...], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True)
class _Peer:
    """A process that is held by `pidfd`, and its pieces."""

    pid: int
    pidfd: int
    pieces: Pieces

    def is_alive(self) -> bool:
        """Whether `pid` still names the process that `pidfd` holds."""
        # Not `select.select`, which cannot name a descriptor beyond 1023: a server with many clients has more.
        look = select.poll()
        look.register(self.pidfd, select.POLLIN)
        return not look.poll(0)


@dataclass(slots=True, eq=False)
class _Job:
    """An open ticket. `near` and `far` are N x 2 columns, address and length, `first` is the next row to copy,
    `turn_bytes` what is left of its turn."""

    ticket: Ticket
    name: str
    peer: _Peer
    direction: Direction
    near: Vectors
    far: Vectors
    first: int = 0
    turn_bytes: int = TURN_BYTES


_Where = Callable[[_Job], bool]
_Call = Callable[..., int]


class CrossMemoryTransport:
    """Copies between the memory of two processes of one host, in `poll`, 16 MiB at a time.

    Raises TransportError where the kernel has no such call.
    """

    def __init__(self) -> None:
        self._origin = origin_here()
        self._started = _started(os.getpid())
        self._calls = {Direction.READ: _call("process_vm_readv"), Direction.WRITE: _call("process_vm_writev")}
        self._registry = Registry()
        self._peers: dict[str, _Peer] = {}
        self._numbers = count(1)
        self._jobs: deque[_Job] = deque()
        self._ended: list[Completion] = []

    @property
    def name(self) -> str:
        return "cma"

    @property
    def progress_interval_s(self) -> float:
        return float("inf")

    def register(self, memory: Memory) -> None:
        """Raises TransportError when the memory overlaps registered memory."""
        self._registry.add(memory)

    def unregister(self, memory: Memory) -> None:
        """Raises TransportError when it is not registered. Connected peers can still reach it."""
        self._registry.remove(memory)

    def descriptor(self) -> bytes:
        """Raises TransportError when there are so many pieces that it would be longer than a peer accepts."""
        known = CrossMemoryDescriptor(self._origin, os.getpid(), self._started, self._registry.extents)
        return check_size(msgspec.msgpack.encode(known))

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError when the peer lives elsewhere, has ended, or may not be read by this user."""
        self.disconnect(peer)
        known = decode(peer, descriptor, CrossMemoryDescriptor)
        check_same(peer, known.origin, self._origin)
        pieces = Pieces.of(known.pieces)
        held = _Peer(known.pid, _hold(peer, known), pieces)
        try:
            self._try_to_read(peer, held)
        except BaseException:
            os.close(held.pidfd)
            raise
        self._peers[peer] = held

    def carriers(self, peer: str) -> tuple[str, ...]:
        return (self.name,)

    def disconnect(self, peer: str) -> None:
        self._drop(lambda job: job.name == peer, f"peer {peer!r} was disconnected")
        if known := self._peers.pop(peer, None):
            os.close(known.pidfd)

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected or a row leaves registered memory."""
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer!r} is not connected")
        is_read = direction is Direction.READ
        near, far = (copies.target, copies.source) if is_read else (copies.source, copies.target)
        # Checked before it is split: a row of nonsense length would be split into very many.
        self._registry.pieces.check(near, copies.length, f"this process ({direction})")
        known.pieces.check(far, copies.length, f"peer {peer!r} ({direction})")
        rows = split(copies, CALL_BYTES)
        source, target = _vectors(rows.source, rows.length), _vectors(rows.target, rows.length)
        sides = (target, source) if is_read else (source, target)
        job = _Job(Ticket(next(self._numbers)), peer, known, direction, *sides)
        self._jobs.append(job)
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        self._drop(lambda job: job.ticket == ticket, "cancelled")

    def poll(self) -> list[Completion]:
        budget = SLICE_BYTES
        while self._jobs and budget > 0:
            job = self._jobs.popleft()
            copied, error = self._advance(job)
            budget -= copied
            job.turn_bytes -= copied
            if error or job.first >= len(job.near):
                self._ended.append(Completion(job.ticket, error))
            elif job.turn_bytes > 0:
                self._jobs.appendleft(job)
            else:
                job.turn_bytes = TURN_BYTES
                self._jobs.append(job)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._drop(lambda job: True, "this transport was closed")
        for name in list(self._peers):
            self.disconnect(name)
        self._registry.clear()

    def _drop(self, where: _Where, error: str) -> None:
        self._ended += [Completion(job.ticket, error) for job in self._jobs if where(job)]
        self._jobs = deque(job for job in self._jobs if not where(job))

    def _advance(self, job: _Job) -> tuple[int, str]:
        """Copy a call's rows; how many bytes that were, and what went wrong."""
        part = slice(job.first, job.first + _num_rows(job.near[job.first : job.first + MAX_ROWS, 1]))
        job.first = part.stop
        near, far = job.near[part], job.far[part]
        wanted = int(near[:, 1].sum())
        if job.direction is Direction.WRITE and not job.peer.is_alive():
            return 0, f"process {job.peer.pid} has ended"
        copied, error = self._copy(job, near, far) if wanted else (0, "")
        if not job.peer.is_alive():
            return copied, f"process {job.peer.pid} has ended"
        if not error and copied != wanted:
            error = f"{copied} of {wanted} bytes: the rest of the peer's memory is gone"
        return copied, error

    def _copy(self, job: _Job, near: Vectors, far: Vectors) -> tuple[int, str]:
        call = self._calls[job.direction]
        copied = int(call(job.peer.pid, near.ctypes.data, len(near), far.ctypes.data, len(far), 0))
        return (0, os.strerror(ctypes.get_errno())) if copied < 0 else (copied, "")

    def _try_to_read(self, name: str, peer: _Peer) -> None:
        """One byte tells whether the kernel allows it."""
        scratch = np.zeros(1, np.uint8)
        length = np.ones(1, np.uint64)
        near = _vectors(np.array([scratch.ctypes.data], np.uint64), length)
        far = _vectors(peer.pieces.address[:1], length)
        if len(far):
            job = _Job(Ticket(0), name, peer, Direction.READ, near, far)
            _, error = self._advance(job)
            if error:
                raise TransportError(
                    f"the kernel does not let this process read the memory of peer {name!r}",
                    found=f"process {peer.pid}: {error}",
                    hint="run both as the same user and set kernel.yama.ptrace_scope to 0, or use shm, tcp or nixl",
                )


def _vectors(address: NDArray[np.uint64], length: NDArray[np.uint64]) -> Vectors:
    """What the kernel calls iovec: pairs of address and length."""
    return np.ascontiguousarray(np.stack([address, length], axis=1))


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


def _started(pid: int) -> int:
    """When a process was started, in the kernel's ticks: together with its id that names it once and for all."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name comes in parentheses and may hold anything.
            return int(file.read().rpartition(")")[2].split()[START_FIELD])
    except OSError as error:
        raise TransportError(f"process {pid} cannot be found", found=os_error_text(error)) from error


def _hold(name: str, known: CrossMemoryDescriptor) -> int:
    """A pidfd of the very process that was described."""
    try:
        pidfd = os.pidfd_open(known.pid)
    except OSError as error:
        raise TransportError(f"peer {name!r} has ended", found=f"process {known.pid}: {error.strerror}") from error
    try:
        started = _started(known.pid)
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
