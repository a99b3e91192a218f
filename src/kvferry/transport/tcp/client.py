"""The asking side of tcp: one thread and one connection per peer, tickets one after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from kvferry.errors import FerryError, TransportError
from kvferry.system.os_errors import os_error_text
from kvferry.transport.base import Completion, Direction, Ticket
from kvferry.transport.registered_memory import Column, Offsets, Side
from kvferry.transport.rowcopy.gather_scatter import gather, scatter, stream_chunks
from kvferry.transport.tcp.connection import (
    CHUNK_BYTES,
    MAX_ROWS,
    Challenge,
    Connection,
    Reply,
    Request,
    open_connection,
    proof_of,
)


@dataclass(frozen=True, slots=True)
class Far:
    """Where a peer listens and the key that it wants to be known."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A ticket to work off: rows of at most CHUNK_BYTES, here as places and there as addresses."""

    ticket: Ticket
    direction: Direction
    local: Side
    remote: Column
    length: Offsets

    def parts(self) -> Iterator[Order]:
        """In the sizes of one request."""
        for first in range(0, len(self.length), MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            yield Order(self.ticket, self.direction, self.local.rows(part), self.remote[part], self.length[part])


class Lane:
    """Works off orders and puts their completions into `ended`. A connection is made when the first order comes.

    After any failure of the connection all waiting orders end with its reason; the next one tries a new connection.
    """

    def __init__(self, far: Far, ended: SimpleQueue[Completion], stall_timeout_s: float) -> None:
        self._far = far
        self._ended = ended
        self._stall_timeout_s = stall_timeout_s
        self._orders: SimpleQueue[Order | str] = SimpleQueue()
        self._cancelled: set[Ticket] = set()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._proof = b""
        self._stopped = ""
        self._staging = np.empty(2 * CHUNK_BYTES, np.uint8)
        self._thread = threading.Thread(target=self._run, name="kvferry-tcp-lane", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Queue a ticket."""
        self._orders.put(order)

    def cancel(self, ticket: Ticket) -> None:
        """Skip what has not been asked for yet. Unknown and ended tickets are fine."""
        self._cancelled.add(ticket)

    def stop(self, reason: str) -> None:
        """End all tickets with this error, soon: those on the wire when their thread has let go of the memory."""
        with self._lock:
            self._stopped = self._stopped or reason
            if self._connection is not None:
                self._connection.interrupt()
        self._orders.put(reason)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a stopped lane."""
        self._thread.join(timeout_s)

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, and so all tickets have."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            order = self._orders.get()
            if isinstance(order, Order):
                self._finish(order, self._attempt(order))
        self._hang_up(self._stopped)

    def _attempt(self, order: Order) -> str:
        """The error of the ticket, or nothing."""
        try:
            return self._work_off(order)
        except TransportError as error:
            return str(error)  # A refusal. The connection is in step, others can use it.
        except (OSError, FerryError) as error:
            reason = self._stopped or f"connection to {self._far.host}:{self._far.port}: {os_error_text(error)}"
        except Exception as error:  # noqa: BLE001 - the top of a thread: the ticket must end whatever happens
            reason = f"{type(error).__name__}: {error}"
        self._hang_up(reason)
        return reason

    def _work_off(self, order: Order) -> str:
        for part in order.parts():
            if self._stopped or order.ticket in self._cancelled:
                return self._stopped or "cancelled"
            connection = self._connected()
            columns = np.stack((part.remote, part.length.astype(np.uint64))).astype("<u8", copy=False)
            request = Request(self._proof, part.direction, len(part.length))
            connection.send_message(request, columns.tobytes())
            _expect_granted(connection)
            if part.direction is Direction.READ:
                self._receive(connection, part)
            else:
                self._send(connection, part)
                _expect_granted(connection)
        return ""

    def _receive(self, connection: Connection, part: Order) -> None:
        for chunk in stream_chunks(part.length, CHUNK_BYTES):
            sizes, side = part.length[chunk], part.local.rows(chunk)
            if len(sizes) == 1:
                connection.receive_into(_only_row(side, sizes))
                continue
            connection.receive_into(self._staging.data[: int(sizes.sum())])
            scatter(self._staging, side, sizes)

    def _send(self, connection: Connection, part: Order) -> None:
        for chunk in stream_chunks(part.length, CHUNK_BYTES):
            sizes, side = part.length[chunk], part.local.rows(chunk)
            if len(sizes) == 1:
                connection.send(_only_row(side, sizes))
                continue
            gather(side, sizes, self._staging)
            connection.send(self._staging.data[: int(sizes.sum())])

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = open_connection((self._far.host, self._far.port), self._stall_timeout_s)
            with self._lock:
                self._connection = connection
                if self._stopped:
                    connection.interrupt()
            self._proof = proof_of(self._far.key, connection.receive_message(Challenge))
        return self._connection

    def _hang_up(self, reason: str) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            if isinstance(order, Order):
                self._finish(order, reason)

    def _finish(self, order: Order, error: str) -> None:
        self._cancelled.discard(order.ticket)
        self._ended.put(Completion(order.ticket, error))


def _only_row(side: Side, sizes: Offsets) -> memoryview:
    start = int(side.begins[0])
    return side.views[int(side.piece[0])].data[start : start + int(sizes[0])]


def _expect_granted(connection: Connection) -> None:
    reply = connection.receive_message(Reply)
    if reply.error:
        raise TransportError("the peer refused the rows", found=reply.error)
