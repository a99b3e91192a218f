"""One connection to a peer: transfers one after another, and a thread while there are any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry.errors import FerryError, TransportError
from kvferry.plan.programs.copies import Column
from kvferry.system import os_error_text
from kvferry.transport.base import Direction, Ticket
from kvferry.transport.registered_memory import LocatedRows, Offsets, View
from kvferry.transport.rowcopy.gather_scatter import gather, scatter, stream_chunks
from kvferry.transport.tcp.connection import (
    CHALLENGE,
    CHUNK_BYTES,
    MAX_ROWS,
    REPLY,
    Connection,
    Request,
    open_connection,
    proof_of,
    scratch_memory,
)

# Longer than between two requests of a busy pair. Without one the next ticket starts a thread, which takes 0.1 ms.
KEEP_THREAD_S = 2.0


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer listens, and the key that a connection must know."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A share of a ticket: rows of at most CHUNK_BYTES, located in local memory, by address in the peer's."""

    ticket: Ticket
    direction: Direction
    local: LocatedRows
    remote: Column
    length: Offsets

    def parts(self) -> Iterator[Transfer]:
        """Cut to the size of one request."""
        for first in range(0, len(self.length), MAX_ROWS):
            yield self.subset(slice(first, first + MAX_ROWS))

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())

    def subset(self, rows: slice) -> Transfer:
        """Only these rows."""
        return Transfer(self.ticket, self.direction, self.local.subset(rows), self.remote[rows], self.length[rows])


class Tickets(Protocol):
    """Whose shares a lane moves. Called by any thread."""

    def is_cancelled(self, ticket: Ticket) -> bool: ...

    def end(self, ticket: Ticket, error: str) -> None: ...


class Lane:
    """Makes transfers one after another, and tells `tickets` of each end. The first one opens the connection. While
    there are none, a lane costs that connection, no thread and no memory to receive into.

    When the connection fails, all waiting transfers end with its reason; the next one opens a new connection. So does
    one that finds the connection closed: a cable that was out for a while has ended it, and nobody was told.

    With a lane `instead`, this one keeps no connection without work, and gives its work to that lane when it gets none:
    a peer may have no room for another.
    """

    def __init__(
        self, address: PeerAddress, tickets: Tickets, stall_timeout_s: float, instead: Lane | None = None
    ) -> None:
        self.pending_bytes = 0
        self._address = address
        self._tickets = tickets
        self._stall_timeout_s = stall_timeout_s
        self._instead = instead
        # Guards what follows, and says that some of it has changed.
        self._changed = threading.Condition()
        self._waiting: deque[Transfer] = deque()
        self._connection: Connection | None = None
        self._stopped = ""
        self._thread: threading.Thread | None = None
        self._is_working = False
        self._proof = b""

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer. Raises RuntimeError when no thread can be started for it."""
        with self._changed:
            if not self._is_working:
                thread = threading.Thread(target=self._work, name="kvferry-tcp-lane", daemon=True)
                thread.start()
                self._thread, self._is_working = thread, True
            self._waiting.append(transfer)
            self.pending_bytes += transfer.num_bytes
            self._changed.notify()

    def stop(self, reason: str) -> None:
        """End all transfers with this error; the one on the wire once the thread does not use its memory any more."""
        with self._changed:
            self._stopped = self._stopped or reason
            if self._connection is not None:
                self._connection.interrupt()
            if not self._is_working:
                self._disconnect(self._stopped)
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a stopped lane."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def is_connected(self) -> bool:
        """Whether a connection has been opened, which may have ended since."""
        return self._connection is not None

    @property
    def is_over(self) -> bool:
        """Whether no thread works, and so all transfers of a stopped lane have ended."""
        return not self._is_working

    def _work(self) -> None:
        try:
            staging = scratch_memory()
        except OSError as error:
            with self._changed:
                self._disconnect(f"no memory for tcp to copy through: {os_error_text(error)}")
                self._is_working = False
            return
        while (transfer := self._next()) is not None:
            if self._instead is None or self._stopped or self._has_connection():
                self._finish(transfer, self._try(transfer, staging))
            else:
                self._hand_over(transfer, self._instead)

    def _next(self) -> Transfer | None:
        """What is to be moved. None, and the thread is to end, when there has been nothing for a while, or the lane is
        stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped, KEEP_THREAD_S)
            if self._waiting and not self._stopped:
                return self._waiting.popleft()
            if self._stopped or self._instead is not None:
                self._disconnect(self._stopped)
            self._is_working = False
            return None

    def _try(self, transfer: Transfer, staging: View) -> str:
        """The error of the ticket, or nothing."""
        try:
            return self._move(transfer, staging)
        except TransportError as error:
            return str(error)  # A refusal. The connection is still usable.
        except (OSError, FerryError) as error:
            reason = self._stopped or f"connection to {self._address.host}:{self._address.port}: {os_error_text(error)}"
        except Exception as error:  # noqa: BLE001 - the top of a thread: the ticket must end whatever happens
            reason = f"{type(error).__name__}: {error}"
        self._disconnect(reason)
        return reason

    def _move(self, transfer: Transfer, staging: View) -> str:
        for part in transfer.parts():
            if self._stopped or self._tickets.is_cancelled(transfer.ticket):
                return self._stopped or "cancelled"
            connection = self._connected()
            columns = np.stack((part.remote, part.length.astype(np.uint64))).astype("<u8", copy=False)
            request = Request(self._proof, part.direction, len(part.length))
            connection.send_message(request, columns.tobytes())
            _expect_granted(connection)
            if part.direction is Direction.READ:
                _receive(connection, part, staging)
            else:
                _send(connection, part, staging)
                _expect_granted(connection)
        return ""

    def _connected(self) -> Connection:
        if self._connection is not None and not self._connection.is_open:
            self._drop_connection()
        if self._stopped:
            raise ConnectionAbortedError(self._stopped)
        if self._connection is None:
            connection = open_connection((self._address.host, self._address.port), self._stall_timeout_s)
            with self._changed:
                self._connection = connection
                if self._stopped:
                    connection.interrupt()
            self._proof = proof_of(self._address.key, connection.receive_message(CHALLENGE))
        return self._connection

    def _has_connection(self) -> bool:
        try:
            self._connected()
        except (OSError, FerryError):
            self._drop_connection()
            return False
        return True

    def _hand_over(self, transfer: Transfer, lane: Lane) -> None:
        """To that lane, with all that waits."""
        with self._changed:
            waiting, self._waiting = [transfer, *self._waiting], deque()
            self.pending_bytes = 0
        for each in waiting:
            try:
                lane.submit(each)
            except RuntimeError as error:
                self._tickets.end(each.ticket, str(error))

    def _drop_connection(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _disconnect(self, reason: str) -> None:
        self._drop_connection()
        with self._changed:
            ended, self._waiting = self._waiting, deque()
        for transfer in ended:
            self._finish(transfer, reason)

    def _finish(self, transfer: Transfer, error: str) -> None:
        with self._changed:
            self.pending_bytes -= transfer.num_bytes
        self._tickets.end(transfer.ticket, error)


def _receive(connection: Connection, part: Transfer, staging: View) -> None:
    for chunk in stream_chunks(part.length, CHUNK_BYTES):
        sizes, side = part.length[chunk], part.local.subset(chunk)
        if len(sizes) == 1:
            connection.receive_into(_only_row(side, sizes))
            continue
        connection.receive_into(staging.data[: int(sizes.sum())])
        scatter(staging, side, sizes)


def _send(connection: Connection, part: Transfer, staging: View) -> None:
    for chunk in stream_chunks(part.length, CHUNK_BYTES):
        sizes, side = part.length[chunk], part.local.subset(chunk)
        if len(sizes) == 1:
            connection.send(_only_row(side, sizes))
            continue
        gather(side, sizes, staging)
        connection.send(staging.data[: int(sizes.sum())])


def _only_row(side: LocatedRows, sizes: Offsets) -> memoryview:
    start = int(side.view_offsets[0])
    return side.views[int(side.view_index[0])].data[start : start + int(sizes[0])]


def _expect_granted(connection: Connection) -> None:
    reply = connection.receive_message(REPLY)
    if reply.error:
        raise TransportError("the peer refused the rows", found=reply.error)
