"""Registered memory of one process, as disjoint regions: whether rows lie in them, and where."""

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

View = NDArray[np.uint8]

Offsets = NDArray[np.int64]

# The columns of this many rows stay in the processor's cache while they are checked.
ROWS_AT_ONCE = 16 << 10
# Peers take no descriptor of more.
MAX_REGIONS = 4096

_ADDRESS_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True, eq=False)
class LocatedRows:
    """Rows on one side of a copy: row i lies in `views[view_index[i]]`, and `offset[i]` says where. Two int64 columns.

    Offsets count from `starts[view_index[i]]`, or from the beginning of the view where `starts` is empty: addresses can
    be used as they are, without a column of differences.
    """

    views: tuple[View, ...]
    view_index: Offsets
    offset: Offsets
    starts: tuple[int, ...] = ()

    def subset(self, which: slice | NDArray[np.intp]) -> LocatedRows:
        """Only some of the rows."""
        return LocatedRows(self.views, self.view_index[which], self.offset[which], self.starts)

    @property
    def view_offsets(self) -> Offsets:
        """The byte of its view at which each row begins."""
        if not self.starts:
            return self.offset
        return self.offset - (self.starts[0] if len(self.starts) == 1 else np.array(self.starts)[self.view_index])

    @property
    def used_views(self) -> list[int]:
        """The indices of the views in which rows lie, ascending."""
        if len(self.views) == 1:
            return [0] if len(self.view_index) else []
        return np.flatnonzero(np.bincount(self.view_index)).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Disjoint regions of one process's registered memory, ascending by address; two uint64 columns.

    `views[i]` shows region i in this process's address space; `views` is empty where the memory is not mapped here.
    With `is_in_place` every view has the address of its region: this process can use addresses as they are.
    """

    address: Column
    size_bytes: Column
    views: tuple[View, ...]
    is_in_place: bool

    @classmethod
    def of(cls, extents: Iterable[tuple[int, int]], views: Iterable[View] = ()) -> Regions:
        """Return regions, given (address, size in bytes) and, if the memory is mapped here, a view of each.

        Raises TransportError when a region is empty, leaves the address space, or overlaps another.
        """
        found = list(extents)
        for start, size_bytes in found:
            if start <= 0 or size_bytes <= 0 or start + size_bytes >= _ADDRESS_LIMIT:
                raise TransportError("invalid range of memory", found=f"{size_bytes} bytes at {start:#x}")
        order = sorted(range(len(found)), key=found.__getitem__)
        address = np.array([found[i][0] for i in order], np.uint64)
        size = np.array([found[i][1] for i in order], np.uint64)
        if (address[:-1] + size[:-1] > address[1:]).any():
            raise TransportError("two regions of memory overlap", expected="every byte registered once")
        shown = tuple(views)
        ordered = tuple(shown[i] for i in order) if shown else ()
        is_in_place = bool(ordered) and [_address_of(view) for view in ordered] == address.tolist()
        return cls(address, size, ordered, is_in_place)

    def with_view(self, view: View) -> Regions:
        """These regions and one more, at the address of a view. Raises TransportError when they overlap."""
        extents = [*zip(self.address.tolist(), self.size_bytes.tolist(), strict=True), (_address_of(view), view.size)]
        return Regions.of(extents, (*self.views, view))

    def check(self, address: Column, length: Column, owner: str) -> None:
        """Raises TransportError naming the first row that does not lie within one region of `owner`."""
        if self._common_region(address, length) is None:
            self.locate(address, length, owner)

    def check_tile(self, start: Column, shift: Column, length: Column, owner: str) -> None:
        """`check` the rows of a tile: for all i and j, one begins at `start[i] + shift[j]`, modulo 2**64, and has
        `length[j]` bytes. They are listed only where the rows of one start do not lie in one region."""
        if not len(start) or not len(shift):
            return
        signed = shift.view(np.int64)
        below, above = int(signed.min()), int(signed.max()) + int(length.max())
        first, stop = int(start.min()) + below, int(start.max()) + above
        if self._region_of(first, stop) is not None:
            return
        if len(self.address) and first >= 0 and stop < _ADDRESS_LIMIT:
            spans = np.full(len(start), above - below, np.uint64)
            if self._search(start + np.uint64(below % (1 << 64)), spans)[1] < 0:
                return
        self.locate(np.add.outer(start, shift).ravel(), np.tile(length, len(start)), owner)

    def locate(self, address: Column, length: Column, owner: str) -> Offsets:
        """The index of each row's region. Raises TransportError like `check`."""
        if not len(self.address):
            if len(address):
                raise TransportError(f"{owner} has no registered memory", expected="register() before post()")
            return np.empty(0, np.int64)
        region, row = self._search(address, length)
        if row >= 0:
            self._refuse(row, (address, length), owner)
        return region

    def _search(self, address: Column, length: Column) -> tuple[Offsets, int]:
        """The index of each row's region, and the first row that does not lie in one, or -1."""
        region = np.empty(len(address), np.int64)
        for first in range(0, len(address), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            region[part] = np.maximum(np.searchsorted(self.address, address[part], side="right") - 1, 0)
            start, size = self.address[region[part]], self.size_bytes[region[part]]
            # Below the first region the difference wraps around to a huge offset, which is outside as well.
            offset = address[part] - start
            outside = (offset > size) | (length[part] > size - offset)
            if outside.any():
                return region, first + int(outside.argmax())
        return region, -1

    def located(self, address: Column, length: Column, owner: str) -> LocatedRows:
        """The rows as offsets in `views`. Raises TransportError like `check`."""
        offset, region = address.view(np.int64), self._common_region(address, length)
        if region is None:
            return LocatedRows(self.views, self.locate(address, length, owner), offset, tuple(self._signed().tolist()))
        start, zeros = (int(self._signed()[region]),), np.broadcast_to(np.int64(0), address.shape)
        return LocatedRows(self.views[region : region + 1], zeros, offset, start)

    def _signed(self) -> Offsets:
        """The addresses, as offsets are taken from them: the difference is the same modulo 2**64."""
        return self.address.view(np.int64)

    def _common_region(self, address: Column, length: Column) -> int | None:
        """The region that holds every row, if one does. Only the extremes are compared: a fifth of the time."""
        if not len(address):
            return None
        return self._region_of(int(address.min()), int(address.max()) + int(length.max()))

    def _region_of(self, first: int, stop: int) -> int | None:
        """The region that holds the bytes from address `first` up to `stop`, if there is one."""
        if not 0 <= first < _ADDRESS_LIMIT or not len(self.address):
            return None
        region = int(np.searchsorted(self.address, np.uint64(first), side="right")) - 1
        is_inside = region >= 0 and stop <= int(self.address[region]) + int(self.size_bytes[region])
        return region if is_inside else None

    def _refuse(self, row: int, columns: tuple[Column, Column], owner: str) -> None:
        start, length = int(columns[0][row]), int(columns[1][row])
        first, last = int(self.address[0]), int(self.address[-1] + self.size_bytes[-1])
        raise TransportError(
            f"row {row} is outside the registered memory of {owner}",
            found=f"{length} bytes at {start:#x}",
            expected=f"within one of {len(self.address)} regions between {first:#x} and {last:#x}",
        )


def _address_of(view: View) -> int:
    found: int = view.__array_interface__["data"][0]
    return found


def view_of(memory: Memory) -> View:
    """This process's memory as bytes. The caller keeps the memory alive while the view is in use."""
    array = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    return np.frombuffer(memoryview(array).cast("B"), np.uint8)


def check_number(num_regions: int) -> None:
    """Raises TransportError when these are more pieces of memory than peers take in a descriptor. What is registered
    for this process alone, such as the buffer of a self-test, does not count."""
    if num_regions > MAX_REGIONS:
        raise TransportError(
            "too many pieces of memory are registered",
            found=f"{num_regions}",
            expected=f"at most {MAX_REGIONS}",
            hint="register fewer, larger pieces of memory",
        )


class Registry:
    """The memory registered with one transport; memory of devices only with `takes_devices`."""

    def __init__(self, *, takes_devices: bool = False) -> None:
        self._takes_devices = takes_devices
        self._views: dict[Memory, View] = {}
        self.regions = Regions.of(())

    def add(self, memory: Memory) -> None:
        """Raises TransportError for an invalid range, memory of a device, and an overlap with registered memory."""
        if memory.device != HOST and not self._takes_devices:
            raise TransportError(
                "this transport reaches host memory only",
                found=f"{memory.device} memory",
                expected="memory of cpu",
                hint="use nixl, or --buffer-device cpu (vLLM: kv_buffer_device), which goes through host memory",
            )
        Regions.of([(known.address, known.size_bytes) for known in (*self._views, memory)])
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

    def check_describable(self) -> None:
        """Raises TransportError when a descriptor would tell of more pieces than peers take."""
        check_number(len(self._views))

    @property
    def memories(self) -> tuple[Memory, ...]:
        """What is registered, oldest first."""
        return tuple(self._views)

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(address, size in bytes) of each registered memory."""
        return tuple((memory.address, memory.size_bytes) for memory in self._views)

    def _refresh(self) -> None:
        # One assignment of a new value: threads that serve peers see the old set or the new one, nothing between.
        self.regions = Regions.of(self.extents, self._views.values())
