"""The serving side of tcp: peers read and write our registered memory.

One thread per connection that is used: a peer that stalls delays no other one, and the expensive steps (copy, send,
receive) run without the interpreter's lock. A connection over which nothing has been asked for a while waits in a
selector with all others of that kind, and costs no thread.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.errors import ConfigurationError, FerryError, TransportError, WireError
from kvferry.plan.programs.copies import Column
from kvferry.system import close_in_children, os_error_text
from kvferry.transport.base import Direction
from kvferry.transport.io_vectors import RowStream
from kvferry.transport.machine.addresses import family_of, resolve
from kvferry.transport.registered_memory import Registry
from kvferry.transport.rowcopy.gather_scatter import stream_chunks
from kvferry.transport.tcp.access_keys import AccessKeys
from kvferry.transport.tcp.connection import (
    CHALLENGE_BYTES,
    CHUNK_BYTES,
    REQUEST,
    Challenge,
    Connection,
    Reply,
    Request,
    proof_of,
)

MAX_CONNECTIONS = 4096
# Each busy peer has four threads. Whoever can connect can have one, until it fails to prove that it knows the key.
MAX_THREADS = 2048
BACKLOG = 512
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


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection, and the key of whoever is at its other end: `key_id` is empty until it has proved that it knows
    it, which takes the `proof` of this `challenge`."""

    connection: Connection
    challenge: Challenge = field(default_factory=lambda: Challenge(secrets.token_bytes(CHALLENGE_BYTES)))
    key_id: bytes = b""
    proof: bytes = b""


class Server:
    """Listens, and serves each connection until it ends or sends something malformed.

    `num_rejected` counts requests that were malformed, unauthenticated or outside registered memory, and connections
    for which there was no room.
    """

    def __init__(self, host: str, registry: Registry, stall_timeout_s: float) -> None:
        self.keys = AccessKeys()
        self._registry = registry
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._served: dict[threading.Thread, _Peer] = {}
        self._idle: dict[int, _Peer] = {}
        self.registration = RegistrationLock()
        self.num_rejected = 0
        try:
            address = resolve(host)
            self._listener = socket.create_server((str(address), 0), family=family_of(address), backlog=BACKLOG)
        except (OSError, ConfigurationError) as error:
            raise TransportError(f"cannot listen on {host!r}", found=os_error_text(error)) from error
        # A connection that is gone before it is accepted must not keep the others waiting.
        self._listener.setblocking(False)
        close_in_children(self)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = select.epoll()
        self._selector.register(self._listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="kvferry-tcp-accept", daemon=True)
        self._thread.start()

    def revoke(self, peer: str) -> None:
        """Make a peer's own key void: when this returns nothing of the peer is copied any more, nor ever will be."""
        key_id = self.keys.revoke(peer)
        if not key_id:
            return
        with self._lock:
            for each in (*self._served.values(), *self._idle.values()):
                if each.key_id == key_id:
                    each.connection.interrupt()
        with self.registration.exclusive():
            pass  # Whoever copies from now on looks at its key first.

    def close(self, timeout_s: float) -> None:
        """Stop listening, end every connection and wait for the threads."""
        self._stopped.set()
        # This wakes the selector; closing alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout_s)
        self._listener.close()
        with self._lock:
            threads, idle = dict(self._served), list(self._idle.values())
            self._idle.clear()
            for peer in threads.values():
                peer.connection.interrupt()
        for peer in idle:
            peer.connection.close()
        for thread in threads:
            thread.join(timeout_s)
        self._selector.close()

    def leave_to_parent(self) -> None:
        """Close the listener in a forked child, which has none of the threads."""
        self._listener.close()

    def _watch(self) -> None:
        """The first thread: it accepts connections, and has those served that ask for something again."""
        while not self._stopped.is_set():
            for fd, _ in self._selector.poll():
                self._wake(fd)

    def _wake(self, fd: int) -> None:
        with self._lock:
            peer = self._idle.pop(fd, None)
        if peer is not None:
            self._selector.unregister(fd)
            self._start(peer)
        elif not self._stopped.is_set():
            self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # Out of descriptors, or a peer that was gone before it was accepted: neither ends the listener.
            self._stopped.wait(0.05)
            return
        try:
            peer = _Peer(Connection(sock, self._stall_timeout_s))
        except OSError:
            sock.close()
            return
        with self._lock:
            has_room = len(self._served) < MAX_THREADS and len(self._served) + len(self._idle) < MAX_CONNECTIONS
        if has_room:
            self._start(peer)
        else:
            self._count_rejected()
            peer.connection.close()

    def _start(self, peer: _Peer) -> None:
        thread = threading.Thread(target=self._serve, args=(peer,), name="kvferry-tcp-serve", daemon=True)
        with self._lock:
            if self._stopped.is_set():
                peer.connection.close()
                return
            self._served[thread] = peer
        try:
            thread.start()
        except RuntimeError:  # No more threads in this process: refuse the peer and go on listening.
            self._forget(thread, peer)

    def _forget(self, thread: threading.Thread, peer: _Peer) -> None:
        with self._lock:
            self._served.pop(thread, None)
            peer.connection.close()

    def _rest(self, peer: _Peer) -> None:
        """Let a connection wait without a thread."""
        fd = peer.connection.fileno()
        with self._lock:
            del self._served[threading.current_thread()]
            if self._stopped.is_set():
                peer.connection.close()
                return
            self._idle[fd] = peer
            try:
                self._selector.register(fd, select.EPOLLIN)
            except OSError:
                # The system watches no more of them. A peer opens another one when it has something to ask.
                del self._idle[fd]
                peer.connection.close()

    def _serve(self, peer: _Peer) -> None:
        try:
            self._serve_requests(peer)
        except OSError:
            pass  # The peer has disconnected or stalled: its side ends its tickets.
        except Exception:  # noqa: BLE001 - the top of a thread: whatever a peer sent, only its connection ends
            self._count_rejected()
        else:
            self._rest(peer)
            return
        self._forget(threading.current_thread(), peer)

    def _serve_requests(self, peer: _Peer) -> None:
        """Serve requests until there has been none for a while, or the server ends."""
        if not peer.key_id:
            peer.connection.send_message(peer.challenge)
        while not self._stopped.is_set() and peer.connection.wait_readable():
            self._answer(peer)
        if not peer.key_id:
            raise WireError("a connection without a request")

    def _answer(self, peer: _Peer) -> None:
        connection = peer.connection
        request = connection.receive_message(REQUEST)
        self._check_key(peer, request)
        address, length = _receive_columns(connection, request.num_rows)
        try:
            self._check(address, length)
        except FerryError as error:
            self._count_rejected()
            connection.send_message(Reply(str(error)[:2048]))
            return
        connection.send_message(Reply(""))
        for rows in stream_chunks(length, CHUNK_BYTES):
            chunk = RowStream(address[rows], length[rows])
            if request.direction is Direction.READ:
                connection.send_rows(chunk, partial(self._copying, peer, chunk))
            else:
                connection.receive_rows(chunk, partial(self._copying, peer, chunk))
        if request.direction is Direction.WRITE:
            connection.send_message(Reply(""))

    def _check_key(self, peer: _Peer, request: Request) -> None:
        """Raises WireError when the key is not valid, or another one than that of the connection's first request."""
        secret = self.keys.secret_of(request.key_id)
        if not peer.key_id:
            peer.proof = proof_of(secret, peer.challenge)
        is_other = peer.key_id not in (b"", request.key_id)
        if is_other or not hmac.compare_digest(request.proof, peer.proof):
            raise WireError("a request with a wrong key")
        peer.key_id = request.key_id

    @contextmanager
    def _copying(self, peer: _Peer, rows: RowStream) -> Iterator[None]:
        """Hold this while bytes of a peer are copied: none of the rows is unregistered meanwhile.

        Raises WireError when the peer's key has been revoked, TransportError when a row has been unregistered.
        """
        with self.registration.shared():
            self.keys.secret_of(peer.key_id)
            self._registry.regions.check(rows.address, rows.length, THIS)
            yield

    def _check(self, address: Column, length: Column) -> None:
        if int(length.min()) < 1 or int(length.max()) > CHUNK_BYTES:
            raise WireError(
                "invalid length of a row",
                found=f"{int(length.min())} to {int(length.max())} bytes",
                expected=f"1 to {CHUNK_BYTES}",
            )
        self._registry.regions.check(address, length, THIS)

    def _count_rejected(self) -> None:
        with self._lock:
            self.num_rejected += 1


def _receive_columns(connection: Connection, num_rows: int) -> tuple[Column, Column]:
    columns = np.empty((2, num_rows), "<u8")
    connection.receive_into(columns.data.cast("B"))
    native = columns.astype(np.uint64, copy=False)
    return native[0], native[1]
