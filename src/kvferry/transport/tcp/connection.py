"""One TCP connection between two engines: frames, raw bytes, and a deadline on each of them."""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import WireError
from kvferry.system import close_in_children, keep_alive
from kvferry.transport import io_vectors
from kvferry.transport.base import Direction
from kvferry.transport.io_vectors import RowStream, Vectors

KEY_BYTES = 16
KEY_ID_BYTES = 16
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
# One request may name this many rows; a longer ticket is several requests.
MAX_ROWS = 64 << 10
# Rows are sent and received in chunks of about this size, and no row of a request is longer.
CHUNK_BYTES = 1 << 20
# A chunk is waited for as a whole for so long, and then for whatever comes.
WAKE_S = 0.1
# Whoever sends so much within the time limit is slow, and not stalled: the limit begins anew.
PROGRESS_BYTES = 64 << 10

_MAGIC = b"KVF1"
_HEADER = struct.Struct(">4sI")
_MAX_FRAME_BYTES = 4096
_COUNT = Annotated[int, Meta(ge=1, le=MAX_ROWS)]

Held = Callable[[], AbstractContextManager[None]]
"""What to hold while rows are copied from or to a socket."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Challenge(msgspec.Struct, frozen=True, tag="challenge-1", forbid_unknown_fields=True):
    """The server's first message. `nonce` is new for every connection, so that no proof is valid for two."""

    nonce: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]


def proof_of(key: bytes, challenge: Challenge) -> bytes:
    """The proof that a client of this connection knows the key."""
    return hmac.digest(key, b"kvferry tcp 2 " + challenge.nonce, hashlib.sha256)


class Request(msgspec.Struct, frozen=True, tag="request-3", forbid_unknown_fields=True):
    """Asks for rows (READ) or announces them (WRITE). Two columns of `num_rows` little-endian uint64 follow:
    addresses in the serving process and lengths. Then, for WRITE and after a first reply, the bytes. `key_id` says
    which key the `proof` is of; all requests of a connection have the same."""

    key_id: Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    direction: Direction
    num_rows: _COUNT


class Reply(msgspec.Struct, frozen=True, tag="reply-1", forbid_unknown_fields=True):
    """`error` is empty when the request is granted (and, after a WRITE, done)."""

    error: Annotated[str, Meta(max_length=2048)]


# Built here, before any thread: msgspec prepares a type at its first use, and two at once end the process.
CHALLENGE: Final = msgspec.msgpack.Decoder(Challenge)
REQUEST: Final = msgspec.msgpack.Decoder(Request)
REPLY: Final = msgspec.msgpack.Decoder(Reply)


class Connection:
    """A connected socket. Every wait of it ends after `stall_timeout_s` with an OSError.

    The socket is a blocking one with time limits kept by the kernel: a receive of a mebibyte is then one system call
    without the interpreter's lock, where Python's own timeouts need two per few kibibytes.
    """

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        self._socket = sock
        self._stall_timeout_s = stall_timeout_s
        self._woken_at = 1
        close_in_children(self)
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

    def send_rows(self, rows: RowStream, held: Held = nullcontext) -> None:
        """Send them from where they lie, and hold them in no call that waits for the peer.

        Raises OSError when it is gone or takes nothing for too long, and what `held` raises.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        num_sent, is_writable = 0, True
        while num_sent < rows.num_bytes:
            with held():
                moved = self._send_now(rows.rest(num_sent))
            num_sent += moved
            # Of a socket with a large buffer the kernel says late that there is room again.
            if not moved and not is_writable:
                raise self._stalled("took")
            is_writable = num_sent == rows.num_bytes or bool(poller.poll(self._stall_timeout_s * 1000))

    def _send_now(self, vectors: Vectors) -> int:
        """How many bytes of these the system took without waiting."""
        try:
            return io_vectors.send(self.fileno(), vectors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises OSError when the peer is gone or the bytes do not come in time."""

        def receive(done: int) -> int:
            return self._socket.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)

        self._receive_all(len(view), receive)

    def receive_rows(self, rows: RowStream, held: Held = nullcontext) -> None:
        """Receive them to where they lie, and hold that in no call that waits for the peer.

        Raises OSError like `receive_into`, and what `held` raises.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)

        def receive(done: int) -> int:
            self._wake_at(rows.num_bytes - done)
            if not poller.poll(WAKE_S * 1000):
                # The network is slow, or the system does not say that the socket is full.
                self._wake_at(1)
                poller.poll(self._stall_timeout_s * 1000)
            with held():
                return io_vectors.receive(self.fileno(), rows.rest(done), socket.MSG_DONTWAIT)

        try:
            self._receive_all(rows.num_bytes, receive)
        finally:
            self._wake_at(1)

    def _wake_at(self, num_bytes: int) -> None:
        """Have the kernel say that something came once so many bytes did, or as many as it has room for."""
        if num_bytes != self._woken_at:
            # A system without this option says so of less, which only costs time.
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._woken_at = num_bytes

    def _receive_all(self, num_bytes: int, receive: Callable[[int], int]) -> None:
        """Call `receive` with the number of bytes that have come, until all have."""
        began, done, done_before = time.monotonic(), 0, 0
        while done < num_bytes:
            try:
                received = receive(done)
            except BlockingIOError as error:
                raise self._stalled("sent") from error
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            done += received
            if done - done_before >= PROGRESS_BYTES:
                began, done_before = time.monotonic(), done
            # A peer that drips byte by byte is as stalled as one that sends nothing.
            elif done < num_bytes and time.monotonic() >= began + self._stall_timeout_s:
                raise self._stalled("sent", f"only {done - done_before} bytes")

    def wait_readable(self) -> bool:
        """Wait until bytes are there (True) or the time limit is over (False). Raises OSError at the end."""
        try:
            waiting = self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not waiting:
            raise ConnectionResetError("the peer closed the connection")
        return True

    @property
    def is_open(self) -> bool:
        """Between two requests, when the peer has nothing to say: whether it has not closed the connection, as far as
        this host knows."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send_message(self, message: msgspec.Struct, columns: bytes = b"") -> None:
        """Raises OSError."""
        payload = msgspec.msgpack.encode(message)
        self.send(_HEADER.pack(_MAGIC, len(payload)) + payload + columns)

    def receive_message(self, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
        """Raises WireError when it is malformed, OSError when it does not come."""
        header = bytearray(_HEADER.size)
        self.receive_into(memoryview(header))
        magic, length = _HEADER.unpack(header)
        if magic != _MAGIC or length > _MAX_FRAME_BYTES:
            raise WireError("unexpected frame", found=f"{magic!r}, {length} bytes")
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError("invalid frame", found=str(error)) from error

    def fileno(self) -> int:
        return self._socket.fileno()

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

    def leave_to_parent(self) -> None:
        """Give up the socket in a forked child; the connection stays its parent's."""
        self._socket.close()

    def _stalled(self, verb: str, what: str = "nothing") -> TimeoutError:
        return TimeoutError(f"the peer {verb} {what} for {self._stall_timeout_s:g} s")


def open_connection(address: tuple[str, int], stall_timeout_s: float) -> Connection:
    """Raises OSError when the peer does not answer in time."""
    return Connection(socket.create_connection(address, timeout=stall_timeout_s), stall_timeout_s)
