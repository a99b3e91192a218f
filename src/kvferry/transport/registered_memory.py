"""Registered memory of one process, as disjoint pieces: where in them a row lies, and whether it lies in one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column
from kvferry.transport.base import Memory
from kvferry.transport.memory_kind import HOST

__all__ = ["Column", "Offsets", "Pieces", "Registry", "Side", "View", "view_of"]

View = NDArray[np.uint8]

Offsets = NDArray[np.int64]

# So many rows are checked at once that what is computed for them stays in the cache.
ROWS_AT_ONCE = 16 << 10

_ADDRESS_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of rows: row i lies in `views[piece[i]]`, and `offset[i]` is where it begins. Two int64 columns.

    Offsets count from `starts[piece[i]]`, or from the beginning of the view where `starts` is empty: addresses can be
    used as they are, without a column of differences.
    """

    views: tuple[View, ...]
    piece: Offsets
    offset: Offsets
    starts: tuple[int, ...] = ()

    def rows(self, which: slice | NDArray[np.intp]) -> Side:
        """Only some of the rows."""
        return Side(self.views, self.piece[which], self.offset[which], self.starts)

    @property
    def begins(self) -> Offsets:
        """At which byte of its view each row begins."""
        if not self.starts:
            return self.offset
        return self.offset - (self.starts[0] if len(self.starts) == 1 else np.array(self.starts)[self.piece])

    @property
    def used(self) -> list[int]:
        """The numbers of the views in which rows lie, ascending."""
        if len(self.views) == 1:
            return [0] if len(self.piece) else []
        return np.flatnonzero(np.bincount(self.piece)).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint pieces of one process's memory, ascending by address; two uint64 columns.

    `views[i]` shows piece i where it can be reached from here; `views` is empty where it cannot. With `is_in_place`
    every view has the address of its piece: this process can use addresses as they are.
    """

    address: Column
    size_bytes: Column
    views: tuple[View, ...]
    is_in_place: bool

    @classmethod
    def of(cls, extents: Iterable[tuple[int, int]], views: Iterable[View] = ()) -> Pieces:
        """From (address, size in bytes) and, if reachable, a view of each.

        Raises TransportError when a piece is empty, leaves the address space, or overlaps another.
        """
        found = list(extents)
        for start, size_bytes in found:
            if start <= 0 or size_bytes <= 0 or start + size_bytes >= _ADDRESS_LIMIT:
                raise TransportError("invalid range of memory", found=f"{size_bytes} bytes at {start:#x}")
        order = sorted(range(len(found)), key=found.__getitem__)
        address = np.array([found[i][0] for i in order], np.uint64)
        size = np.array([found[i][1] for i in order], np.uint64)
        if (address[:-1] + size[:-1] > address[1:]).any():
            raise TransportError("two pieces of memory overlap", expected="every byte registered once")
        shown = tuple(views)
        ordered = tuple(shown[i] for i in order) if shown else ()
        is_in_place = bool(ordered) and [_address_of(view) for view in ordered] == address.tolist()
        return cls(address, size, ordered, is_in_place)

    def beside(self, view: View) -> Pieces:
        """These and what a view shows, at the address where it is here. Raises TransportError when they overlap."""
        extents = [*zip(self.address.tolist(), self.size_bytes.tolist(), strict=True), (_address_of(view), view.size)]
        return Pieces.of(extents, (*self.views, view))

    def check(self, address: Column, length: Column, owner: str) -> None:
        """Raises TransportError naming the first row that does not lie within one piece of `owner`."""
        if self._holder(address, length) is None:
            self.locate(address, length, owner)

    def check_sums(self, start: Column, shift: Column, length: Column, owner: str) -> None:
        """`check` the rows that begin at `start[i] + shift[j]`, modulo 2**64, and have `length[j]` bytes: for all i
        and j, without listing them where what begins at each start lies in one piece."""
        if not len(start) or not len(shift):
            return
        signed = shift.view(np.int64)
        below, above = int(signed.min()), int(signed.max()) + int(length.max())
        first, stop = int(start.min()) + below, int(start.max()) + above
        if self._holds(first, stop) is not None:
            return
        if len(self.address) and first >= 0 and stop < _ADDRESS_LIMIT:
            spans = np.full(len(start), above - below, np.uint64)
            if self._look(start + np.uint64(below % (1 << 64)), spans)[1] < 0:
                return
        self.locate(np.add.outer(start, shift).ravel(), np.tile(length, len(start)), owner)

    def locate(self, address: Column, length: Column, owner: str) -> Offsets:
        """For each row the index of its piece. Raises TransportError like `check`."""
        if not len(self.address):
            if len(address):
                raise TransportError(f"{owner} has no registered memory", expected="register() before post()")
            return np.empty(0, np.int64)
        piece, row = self._look(address, length)
        if row >= 0:
            self._refuse(row, (address, length), owner)
        return piece

    def _look(self, address: Column, length: Column) -> tuple[Offsets, int]:
        """For each row the index of its piece, and the first row that does not lie in one, or -1."""
        piece = np.empty(len(address), np.int64)
        for first in range(0, len(address), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            piece[part] = np.maximum(np.searchsorted(self.address, address[part], side="right") - 1, 0)
            start, size = self.address[piece[part]], self.size_bytes[piece[part]]
            # Below the first piece the difference wraps around to a huge offset, which is outside as well.
            offset = address[part] - start
            outside = (offset > size) | (length[part] > size - offset)
            if outside.any():
                return piece, first + int(outside.argmax())
        return piece, -1

    def side(self, address: Column, length: Column, owner: str) -> Side:
        """The rows as places in `views`. Raises TransportError like `check`."""
        offset, holder = address.view(np.int64), self._holder(address, length)
        if holder is None:
            return Side(self.views, self.locate(address, length, owner), offset, tuple(self.address.tolist()))
        start, zeros = (int(self.address[holder]),), np.broadcast_to(np.int64(0), address.shape)
        return Side(self.views[holder : holder + 1], zeros, offset, start)

    def _holder(self, address: Column, length: Column) -> int | None:
        """The piece that surely holds every row, if one does: their extremes tell, in a fifth of a look at each row."""
        if not len(address):
            return None
        return self._holds(int(address.min()), int(address.max()) + int(length.max()))

    def _holds(self, first: int, stop: int) -> int | None:
        """The piece in which all of these bytes lie, if there is one."""
        if not 0 <= first < _ADDRESS_LIMIT or not len(self.address):
            return None
        piece = int(np.searchsorted(self.address, np.uint64(first), side="right")) - 1
        is_inside = piece >= 0 and stop <= int(self.address[piece]) + int(self.size_bytes[piece])
        return piece if is_inside else None

    def _refuse(self, row: int, columns: tuple[Column, Column], owner: str) -> None:
        start, length = int(columns[0][row]), int(columns[1][row])
        first, last = int(self.address[0]), int(self.address[-1] + self.size_bytes[-1])
        raise TransportError(
            f"row {row} is outside the registered memory of {owner}",
            found=f"{length} bytes at {start:#x}",
            expected=f"within one of {len(self.address)} pieces between {first:#x} and {last:#x}",
        )


def _address_of(view: View) -> int:
    found: int = view.__array_interface__["data"][0]
    return found


def view_of(memory: Memory) -> View:
    """This process's memory as bytes. The caller keeps the memory alive while the view is in use."""
    array = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    return np.frombuffer(memoryview(array).cast("B"), np.uint8)


class Registry:
    """The memory registered with one transport; that of devices only where it `takes_devices`."""

    def __init__(self, *, takes_devices: bool = False) -> None:
        self._takes_devices = takes_devices
        self._views: dict[Memory, View] = {}
        self.pieces = Pieces.of(())

    def add(self, memory: Memory) -> None:
        """Raises TransportError when the memory cannot exist, is a device's, or overlaps registered memory."""
        if memory.device != HOST and not self._takes_devices:
            raise TransportError(
                "this transport reaches host memory only",
                found=f"{memory.device} memory",
                expected="memory of cpu",
                hint="use nixl, or the buffer device 'cpu': the cache then goes through staging memory in the host",
            )
        Pieces.of([(known.address, known.size_bytes) for known in (*self._views, memory)])
        self._views[memory] = view_of(memory)
        self._refresh()

    def remove(self, memory: Memory) -> None:
        """Raises TransportError when the memory is not registered."""
        if self._views.pop(memory, None) is None:
            raise TransportError("this memory is not registered", found=f"{memory}")
        self._refresh()

    def clear(self) -> None:
        """Forget everything."""
        self._views.clear()
        self._refresh()

    @property
    def memories(self) -> tuple[Memory, ...]:
        """What is registered, oldest first."""
        return tuple(self._views)

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(address, size in bytes) of each."""
        return tuple((memory.address, memory.size_bytes) for memory in self._views)

    def _refresh(self) -> None:
        # One assignment of a new value: threads that serve peers see the old set or the new one, nothing between.
        self.pieces = Pieces.of(self.extents, self._views.values())
