"""One connection to a peer, over which transfers are made one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column
from kvferry.transport.base import Direction, Ticket
from kvferry.transport.io_vectors import RowStream
from kvferry.transport.rowcopy.gather_scatter import stream_chunks
from kvferry.transport.tcp.connection import (
    CHALLENGE,
    CHUNK_BYTES,
    MAX_ROWS,
    REPLY,
    Connection,
    Request,
    open_connection,
    proof_of,
)

# What a cancelled write still sends, at most: its peer is in the middle of it.
WRITE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and the key that a connection must know."""

    host: str
    port: int
    key_id: bytes
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A share of a ticket: rows of at most CHUNK_BYTES, by their addresses in this process and in the peer's."""

    ticket: Ticket
    direction: Direction
    local: Column
    remote: Column
    length: Column

    def parts(self) -> Iterator[Transfer]:
        """Cut to the size of one request."""
        for first in range(0, len(self.length), MAX_ROWS):
            part = self.subset(slice(first, first + MAX_ROWS))
            if part.direction is Direction.READ:
                yield part
            else:
                yield from map(part.subset, stream_chunks(part.length, WRITE_BYTES))

    def subset(self, rows: slice) -> Transfer:
        """Only these rows."""
        return Transfer(self.ticket, self.direction, self.local[rows], self.remote[rows], self.length[rows])

    def chunks(self) -> Iterator[RowStream]:
        """The rows in this process, cut to what is moved at a time."""
        for rows in stream_chunks(self.length, CHUNK_BYTES):
            yield RowStream(self.local[rows], self.length[rows])


class Lane:
    """A connection that is opened when it is needed. One thread uses it; others stop it, and look whether it is there.

    One that has ended is opened anew: a cable that was out for a while has ended it, and nobody was told.
    """

    def __init__(self, address: PeerAddress, stall_timeout_s: float) -> None:
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._proof = b""
        self.num_moved = 0
        """Bytes, over all connections; only the thread that moves them writes it."""
        # Guards what follows.
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._stopped = ""

    @property
    def is_connected(self) -> bool:
        """Whether a connection has been opened, which may have ended since."""
        return self._connection is not None

    def connect(self) -> Connection:
        """Raises OSError when the peer does not answer in time or the lane was stopped, WireError when it says what was
        not expected."""
        if self._connection is not None and not self._connection.is_open:
            self.disconnect()
        if self._connection is None:
            if self._stopped:
                raise ConnectionAbortedError(self._stopped)
            connection = open_connection((self._address.host, self._address.port), self._stall_timeout_s)
            with self._lock:
                self._connection = connection
                if self._stopped:
                    connection.interrupt()
            self._proof = proof_of(self._address.key, connection.receive_message(CHALLENGE))
        return self._connection

    def move(self, transfer: Transfer, is_over: Callable[[], str]) -> str:
        """Why nothing is left to move, as `is_over` says: nothing once all is moved. It is asked before each request,
        and before each chunk that is read: what else comes of that is not wanted, and the connection ends.

        Raises TransportError when the peer refuses, and what `connect` does; only after TransportError can the
        connection be used.
        """
        for part in transfer.parts():
            if reason := is_over():
                return reason
            connection = self.connect()
            columns = np.stack((part.remote, part.length)).astype("<u8", copy=False)
            request = Request(self._address.key_id, self._proof, part.direction, len(part.length))
            connection.send_message(request, columns.tobytes())
            _expect_granted(connection)
            if part.direction is Direction.READ:
                if reason := self._receive(connection, part, is_over):
                    self.disconnect()
                    return reason
            else:
                self._send(connection, part)
                _expect_granted(connection)
        return ""

    def _receive(self, connection: Connection, part: Transfer, is_over: Callable[[], str]) -> str:
        for chunk in part.chunks():
            if reason := is_over():
                return reason
            connection.receive_rows(chunk)
            self.num_moved += chunk.num_bytes
        return ""

    def _send(self, connection: Connection, part: Transfer) -> None:
        for chunk in part.chunks():
            connection.send_rows(chunk)
            self.num_moved += chunk.num_bytes

    def stop(self, reason: str) -> None:
        """End what moves, and open no connection any more. From any thread."""
        with self._lock:
            self._stopped = self._stopped or reason
            if self._connection is not None:
                self._connection.interrupt()

    def disconnect(self) -> None:
        """What has not been sent yet never will be."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()


def _expect_granted(connection: Connection) -> None:
    reply = connection.receive_message(REPLY)
    if reply.error:
        raise TransportError("the peer refused the rows", found=reply.error)
