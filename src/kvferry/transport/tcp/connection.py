"""One TCP connection between two engines: frames, raw bytes, rows of memory, and a deadline on each of them."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import WireError
from kvferry.system import keep_alive
from kvferry.transport.base import Direction
from kvferry.transport.vectors import MAX_VECTORS, SystemCall, Vectors, system_call

KEY_BYTES = 16
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
# One request may name this many rows; a longer ticket is several requests.
MAX_ROWS = 64 << 10
# No row of a request is longer, and so many bytes have to come or go in the time after which a peer counts as stalled.
CHUNK_BYTES = 1 << 20

_MAGIC = b"KVF1"
_HEADER = struct.Struct(">4sI")
_MAX_FRAME_BYTES = 4096
_COUNT = Annotated[int, Meta(ge=1, le=MAX_ROWS)]

Message = TypeVar("Message", bound=msgspec.Struct)


class Challenge(msgspec.Struct, frozen=True, tag="challenge-1", forbid_unknown_fields=True):
    """The server's first message. `nonce` is new for every connection, so that no proof is valid for two."""

    nonce: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]


def proof_of(key: bytes, challenge: Challenge) -> bytes:
    """The proof that a client of this connection knows the key."""
    return hmac.digest(key, b"kvferry tcp 2 " + challenge.nonce, hashlib.sha256)


class Request(msgspec.Struct, frozen=True, tag="request-2", forbid_unknown_fields=True):
    """Asks for rows (READ) or announces them (WRITE). Two columns of `num_rows` little-endian uint64 follow:
    addresses in the serving process and lengths. Then, for WRITE and after a first reply, the bytes."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    direction: Direction
    num_rows: _COUNT


class Reply(msgspec.Struct, frozen=True, tag="reply-1", forbid_unknown_fields=True):
    """`error` is empty when the request is granted (and, after a WRITE, done)."""

    error: Annotated[str, Meta(max_length=2048)]


Hold = Callable[[Vectors], AbstractContextManager[None]]
"""Keeps the memory of these rows in place while it is held. Raises FerryError when it is not there any more."""


class MessageHeader(ctypes.Structure):
    """What the kernel calls msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Connection:
    """A connected socket. Every wait of it ends after `stall_timeout_s` with an OSError.

    The socket is a blocking one with time limits kept by the kernel: a receive of a mebibyte is then one system call
    without the interpreter's lock, where Python's own timeouts need two per few kibibytes.
    """

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        self._socket = sock
        self._stall_timeout_s = stall_timeout_s
        sock.setblocking(True)
        limit = struct.pack("ll", int(stall_timeout_s), int(stall_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        keep_alive(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Also after the process is gone: what the kernel has not delivered by then must not be delivered later.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))

    def send(self, data: memoryview | bytes) -> None:
        """Raises OSError when the peer is gone or takes nothing for too long."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise self._stalled("took") from error

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises OSError when the peer is gone or the bytes do not come in time."""
        deadline = time.monotonic() + self._stall_timeout_s
        while len(view):
            try:
                received = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise self._stalled("sent") from error
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            view = view[received:]
            # A peer that drips byte by byte is as stalled as one that sends nothing.
            if len(view) and time.monotonic() >= deadline:
                raise self._stalled("sent")

    def send_rows(self, rows: Vectors, hold: Hold) -> None:
        """Send rows of memory, without a copy in between. Raises like `send`, and what `hold` raises."""
        self._move(rows, hold, _sendmsg(), select.POLLOUT, "took")

    def receive_rows(self, rows: Vectors, hold: Hold) -> None:
        """Fill rows of memory. Raises like `receive_into`, and what `hold` raises."""
        self._move(rows, hold, _recvmsg(), select.POLLIN, "sent")

    def wait_readable(self) -> bool:
        """Wait until bytes are there (True) or the time limit is over (False). Raises OSError at the end."""
        try:
            waiting = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not waiting:
            raise ConnectionResetError("the peer closed the connection")
        return True

    def send_message(self, message: msgspec.Struct, columns: bytes = b"") -> None:
        """Raises OSError."""
        payload = msgspec.msgpack.encode(message)
        self.send(_HEADER.pack(_MAGIC, len(payload)) + payload + columns)

    def receive_message(self, kind: type[Message]) -> Message:
        """Raises WireError when it is malformed, OSError when it does not come."""
        header = bytearray(_HEADER.size)
        self.receive_into(memoryview(header))
        magic, length = _HEADER.unpack(header)
        if magic != _MAGIC or length > _MAX_FRAME_BYTES:
            raise WireError("unexpected frame", found=f"{magic!r}, {length} bytes")
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError("invalid frame", found=str(error)) from error

    def interrupt(self) -> None:
        """End every wait, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It was not connected any more, which is all that is wanted.

    def close(self) -> None:
        """Give the socket back; by the thread that uses it."""
        self._socket.close()

    def abort(self) -> None:
        """Give the socket back; what has not been sent yet never will be."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _move(self, rows: Vectors, hold: Hold, call: SystemCall, event: int, verb: str) -> None:
        """No call waits, so that rows are held for no longer than it takes to copy them. The rows are changed."""
        poller = select.poll()
        poller.register(self._socket, event)
        pending, num_due, deadline = PendingRows(rows), 0, 0.0
        while len(part := pending.next()):
            if pending.num_moved >= num_due:
                num_due = pending.num_moved + CHUNK_BYTES
                deadline = time.monotonic() + self._stall_timeout_s
            with hold(part):
                moved = _moved(call, self._socket.fileno(), part)
            pending.advance(moved)
            left_s = deadline - time.monotonic()
            if moved:
                # A peer that drips byte by byte is as stalled as one that does nothing.
                is_stalled = left_s <= 0 and pending.num_moved < num_due and len(pending.next()) > 0
            else:
                is_stalled = left_s <= 0 or not poller.poll(left_s * 1000)
            if is_stalled:
                raise self._stalled(verb)

    def _stalled(self, verb: str) -> TimeoutError:
        return TimeoutError(f"the peer {verb} nothing for {self._stall_timeout_s:g} s")


class PendingRows:
    """Rows of which `num_moved` bytes are moved, in their order. What is left of a row is written into the array."""

    def __init__(self, rows: Vectors) -> None:
        self.num_moved = 0
        self._rows = rows
        self._stop = np.cumsum(rows[:, 1])
        self._first = 0

    def next(self) -> Vectors:
        """As many as one call takes; none when all are moved."""
        return self._rows[self._first : self._first + MAX_VECTORS]

    def advance(self, num_bytes: int) -> None:
        """So many bytes of what is pending have been moved."""
        self.num_moved += num_bytes
        # A plain integer would have the whole column converted to floats.
        self._first = int(np.searchsorted(self._stop, np.uint64(self.num_moved), side="right"))
        if self._first < len(self._rows):
            address, length = self._rows[self._first].tolist()
            left = int(self._stop[self._first]) - self.num_moved
            self._rows[self._first] = address + length - left, left


@cache
def _sendmsg() -> SystemCall:
    return system_call("sendmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


@cache
def _recvmsg() -> SystemCall:
    return system_call("recvmsg", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def _moved(call: SystemCall, fd: int, rows: Vectors) -> int:
    """The bytes that one call has moved; 0 when it would have to wait. Raises OSError when the peer is gone."""
    header = MessageHeader(vectors=rows.ctypes.data, num_vectors=len(rows))
    moved = int(call(fd, ctypes.byref(header), _FLAGS))
    if moved > 0:
        return moved
    if moved == 0:
        raise ConnectionResetError("the peer closed the connection")
    if (code := ctypes.get_errno()) in (errno.EAGAIN, errno.EINTR):
        return 0
    raise OSError(code, os.strerror(code))


def open_connection(address: tuple[str, int], stall_timeout_s: float) -> Connection:
    """Raises OSError when the peer does not answer in time."""
    return Connection(socket.create_connection(address, timeout=stall_timeout_s), stall_timeout_s)
