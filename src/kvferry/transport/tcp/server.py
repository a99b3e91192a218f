"""The serving side of tcp: peers read and write our registered memory.

One thread per connection: a peer that stalls delays no other one, and the expensive steps (copy, send, receive) run
without the interpreter's lock. There is one connection per peer, so threads are few.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvferry.errors import ConfigurationError, FerryError, TransportError, WireError
from kvferry.plan.programs.copies import Column
from kvferry.system import os_error_text
from kvferry.transport.base import Direction
from kvferry.transport.machine.addresses import family_of, resolve
from kvferry.transport.registered_memory import Offsets, Registry, View
from kvferry.transport.rowcopy.gather_scatter import gather, scatter, stream_chunks
from kvferry.transport.tcp.connection import (
    CHALLENGE_BYTES,
    CHUNK_BYTES,
    MAX_ROWS,
    Challenge,
    Connection,
    Reply,
    Request,
    proof_of,
)

MAX_CONNECTIONS = 512
THIS = "the serving process"


class RegistrationLock:
    """A readers-writer lock: many threads copy to and from registered memory, one changes what is registered."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_shared = 0
        self._is_exclusive = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold this only while bytes are copied, never while waiting for a peer."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_exclusive)
            self._num_shared += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no thread copies, and keep all from copying meanwhile."""
        with self._condition:
            self._is_exclusive = True
            self._condition.wait_for(lambda: not self._num_shared)
        try:
            yield
        finally:
            with self._condition:
                self._is_exclusive = False
                self._condition.notify_all()


class Server:
    """Listens, and serves each connection in a thread until it ends or sends something malformed.

    `num_rejected` counts requests that were malformed, unauthenticated or outside registered memory.
    """

    def __init__(self, host: str, key: bytes, registry: Registry, stall_timeout_s: float) -> None:
        self._key = key
        self._registry = registry
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._connections: dict[threading.Thread, Connection] = {}
        self.registration = RegistrationLock()
        self.num_rejected = 0
        try:
            address = resolve(host)
            self._listener = socket.create_server((str(address), 0), family=family_of(address), backlog=64)
        except (OSError, ConfigurationError) as error:
            raise TransportError(f"cannot listen on {host!r}", found=os_error_text(error)) from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kvferry-tcp-accept", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop listening, end every connection and wait for the threads."""
        self._stopped.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # This wakes accept(); closing alone does not.
        except OSError:
            self._stopped.set()
        self._thread.join(timeout_s)
        self._listener.close()
        with self._lock:
            threads = list(self._connections)
            for connection in self._connections.values():
                connection.interrupt()
        for thread in threads:
            thread.join(timeout_s)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
                self._start(sock)
            except OSError:
                # Out of descriptors, or a peer that was gone before it was accepted: neither ends the listener.
                self._stopped.wait(0.05)

    def _start(self, sock: socket.socket) -> None:
        try:
            connection = Connection(sock, self._stall_timeout_s)
        except OSError:
            sock.close()
            raise
        thread = threading.Thread(target=self._serve, args=(connection,), name="kvferry-tcp-serve", daemon=True)
        with self._lock:
            if self._stopped.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                self.num_rejected += 1
                connection.close()
                return
            self._connections[thread] = connection
        try:
            thread.start()
        except RuntimeError:  # No more threads in this process: refuse the peer and go on listening.
            self._forget(thread, connection)

    def _forget(self, thread: threading.Thread, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(thread, None)
            connection.close()

    def _serve(self, connection: Connection) -> None:
        try:
            self._serve_requests(connection)
        except OSError:
            pass  # The peer has disconnected or stalled: its side ends its tickets.
        except Exception:  # noqa: BLE001 - the top of a thread: whatever a peer sent, only its connection ends
            self._count_rejected()
        finally:
            self._forget(threading.current_thread(), connection)

    def _serve_requests(self, connection: Connection) -> None:
        staging = np.empty(2 * CHUNK_BYTES, np.uint8)
        has_requested = False
        challenge = Challenge(secrets.token_bytes(CHALLENGE_BYTES))
        connection.send_message(challenge)
        proof = proof_of(self._key, challenge)
        while not self._stopped.is_set():
            if connection.wait_readable():
                self._answer(connection, staging, proof)
                has_requested = True
            elif not has_requested:
                raise WireError("a connection without a request")

    def _answer(self, connection: Connection, staging: View, proof: bytes) -> None:
        request = connection.receive_message(Request)
        if not hmac.compare_digest(request.proof, proof):
            raise WireError("a request with a wrong key")
        address, length = _receive_columns(connection, request.num_rows)
        try:
            self._check(address, length)
        except FerryError as error:
            self._count_rejected()
            connection.send_message(Reply(str(error)[:2048]))
            return
        connection.send_message(Reply(""))
        serve = self._send if request.direction is Direction.READ else self._receive
        serve(connection, (address, length), staging)

    def _check(self, address: Column, length: Column) -> None:
        if int(length.min()) < 1 or int(length.max()) > CHUNK_BYTES:
            raise WireError(
                "invalid length of a row",
                found=f"{int(length.min())} to {int(length.max())} bytes",
                expected=f"1 to {CHUNK_BYTES}",
            )
        self._registry.regions.check(address, length, THIS)

    def _send(self, connection: Connection, rows: tuple[Column, Column], staging: View) -> None:
        for address, length, sizes in _chunks(rows):
            # Memory may have been unregistered since the last chunk, so each chunk is checked again.
            with self.registration.shared():
                gather(self._registry.regions.located(address, length, THIS), sizes, staging)
            connection.send(staging.data[: int(sizes.sum())])

    def _receive(self, connection: Connection, rows: tuple[Column, Column], staging: View) -> None:
        for address, length, sizes in _chunks(rows):
            connection.receive_into(staging.data[: int(sizes.sum())])
            with self.registration.shared():
                scatter(staging, self._registry.regions.located(address, length, THIS), sizes)
        connection.send_message(Reply(""))

    def _count_rejected(self) -> None:
        with self._lock:
            self.num_rejected += 1


def _chunks(rows: tuple[Column, Column]) -> Iterator[tuple[Column, Column, Offsets]]:
    address, length = rows
    sizes = length.astype(np.int64)
    for chunk in stream_chunks(sizes, CHUNK_BYTES):
        yield address[chunk], length[chunk], sizes[chunk]


def _receive_columns(connection: Connection, num_rows: int) -> tuple[Column, Column]:
    if not 0 < num_rows <= MAX_ROWS:
        raise WireError("invalid number of rows", found=str(num_rows))
    columns = np.empty((2, num_rows), "<u8")
    connection.receive_into(columns.data.cast("B"))
    native = columns.astype(np.uint64, copy=False)
    return native[0], native[1]
