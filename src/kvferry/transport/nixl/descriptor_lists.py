"""Rows as NIXL's descriptor lists, cut into parts of one kind of memory per side."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column
from kvferry.transport.memory_kind import HOST, MemoryKind, kind_of
from kvferry.transport.registered_memory import Regions

# A part takes about 10 ms at 2 µs per descriptor and 8 GB/s.
PART_ROWS = 4096
PART_BYTES = 64 << 20

Descriptors = NDArray[np.uint64]
"""NIXL's form of rows: N x 3 (address, length, device)."""
Marks = tuple[NDArray[np.bool_], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one NIXL transfer: a descriptor list for each side, of one kind of memory each."""

    local: Descriptors
    remote: Descriptors
    local_kind: MemoryKind = MemoryKind.DRAM
    remote_kind: MemoryKind = MemoryKind.DRAM


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """The kind of memory and the device number of each region of a side, ascending by address.

    Empty where all regions are host memory.
    """

    kinds: tuple[MemoryKind, ...] = ()
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, extents: Sequence[tuple[int, int]], devices: Sequence[tuple[str, int]]) -> Devices:
        """Raises TransportError for a device whose memory cannot be registered, or when there are not as many."""
        if not devices or all(device == HOST for device, _ in devices):
            return cls()
        if len(devices) != len(extents):
            raise TransportError(
                "a device is named for another number of regions", found=f"{len(devices)}", expected=f"{len(extents)}"
            )
        order = sorted(range(len(extents)), key=extents.__getitem__)
        return cls(tuple(kind_of(devices[i][0]) for i in order), tuple(devices[i][1] for i in order))

    def mark(self, rows: Descriptors, regions: Regions) -> NDArray[np.bool_]:
        """Write the device numbers into the rows; returns which of them lie in a device's memory."""
        if not self.kinds:
            return np.zeros(len(rows), np.bool_)
        region = regions.locate(rows[:, 0], rows[:, 1], "a device")
        rows[:, 2] = np.array(self.numbers, np.uint64)[region]
        return np.array([kind is MemoryKind.VRAM for kind in self.kinds])[region]


def descriptor_list(address: Column, length: Column) -> Descriptors:
    """Rows as NIXL wants them, contiguous, on device 0."""
    rows = np.zeros((len(address), 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = length
    return rows


def cut_by_kind(local: Descriptors, remote: Descriptors, on_device: Marks) -> deque[Part]:
    """Cut into parts like `cut`, each of one kind of memory per side; `on_device` marks the rows of both sides."""
    parts: deque[Part] = deque()
    for here, there in ((False, False), (False, True), (True, False), (True, True)):
        rows = np.flatnonzero((on_device[0] == here) & (on_device[1] == there))
        kinds = [MemoryKind.VRAM if is_device else MemoryKind.DRAM for is_device in (here, there)]
        if len(rows) == len(local):
            return deque(Part(*part, *kinds) for part in cut(local, remote))
        parts += [Part(*part, *kinds) for part in cut(local[rows], remote[rows])]
    return parts


def cut(local: Descriptors, remote: Descriptors) -> deque[tuple[Descriptors, Descriptors]]:
    """Cut into parts of at most PART_ROWS rows and about PART_BYTES bytes."""
    end = np.cumsum(local[:, 1].astype(np.int64))
    parts: deque[tuple[Descriptors, Descriptors]] = deque()
    first = 0
    while first < len(local):
        before = int(end[first - 1]) if first else 0
        last = int(np.searchsorted(end, before + PART_BYTES, side="right"))
        last = min(max(last, first + 1), first + PART_ROWS)
        parts.append((local[first:last], remote[first:last]))
        first = last
    return parts
