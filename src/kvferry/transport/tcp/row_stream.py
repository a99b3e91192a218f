"""Rows of this process's memory over one connection, one after another.

Long rows go straight between the memory and the socket, many in one system call. Short ones are gathered into a buffer
first, and scattered from one: the kernel takes longer to find a short row than to copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from kvferry.plan.programs.copies import Column
from kvferry.transport.registered_memory import Offsets, Regions, View
from kvferry.transport.rowcopy.gather_scatter import gather, scatter, stream_chunks
from kvferry.transport.tcp.connection import CHUNK_BYTES, Connection
from kvferry.transport.vectors import Vectors, vectors_of

# From this mean length on, rows are long (`python benchmarks/transports.py --transports tcp`).
LONG_ROW_BYTES = 1 << 10

Lend = Callable[[], AbstractContextManager[Regions]]
"""What is registered. It stays so while the context is held, which is never while a peer is waited for."""


class RowStream:
    """One connection, and the memory that its rows lie in. `owner` is whose memory it is, for messages."""

    def __init__(self, connection: Connection, lend: Lend, owner: str) -> None:
        self._connection = connection
        self._lend = lend
        self._owner = owner
        self._buffer = np.empty(2 * CHUNK_BYTES, np.uint8)

    def send(self, address: Column, length: Column) -> None:
        """Raises OSError when the peer is gone or stalls, TransportError when a row is not in registered memory."""
        if _are_long(length):
            self._connection.send_rows(vectors_of(address, length), self._held)
            return
        for chunk, sizes, part in self._chunks(length):
            with self._lend() as regions:
                gather(regions.located(address[chunk], length[chunk], self._owner), sizes, self._buffer)
            self._connection.send(part)

    def receive(self, address: Column, length: Column) -> None:
        """Raises like `send`."""
        if _are_long(length):
            self._connection.receive_rows(vectors_of(address, length), self._held)
            return
        for chunk, sizes, part in self._chunks(length):
            self._connection.receive_into(part)
            with self._lend() as regions:
                scatter(self._buffer, regions.located(address[chunk], length[chunk], self._owner), sizes)

    @contextmanager
    def _held(self, rows: Vectors) -> Iterator[None]:
        """Memory may have been unregistered since these rows were asked for, so each call checks its own again."""
        with self._lend() as regions:
            regions.check(rows[:, 0], rows[:, 1], self._owner)
            yield

    def _chunks(self, length: Column) -> Iterator[tuple[slice, Offsets, memoryview]]:
        """Rows that fit the buffer together, their sizes, and the part of the buffer that they fill."""
        sizes: Offsets = length.astype(np.int64)
        buffer: View = self._buffer
        for chunk in stream_chunks(sizes, CHUNK_BYTES):
            yield chunk, sizes[chunk], buffer.data[: int(sizes[chunk].sum())]


def _are_long(length: Column) -> bool:
    return int(length.sum()) >= LONG_ROW_BYTES * len(length)
