"""What goes to a peer and to NIXL: the sealed descriptor, and rows as NIXL's arrays, cut into parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.transport.descriptor_codec import Natural, check_size
from kvferry.transport.memory_kind import HOST, MemoryKind, kind_of
from kvferry.transport.registered_memory import Column, Pieces

# A part takes about 10 ms at 2 µs per descriptor and 8 GB/s.
PART_ROWS = 4096
PART_BYTES = 64 << 20

_MAGIC: Final = b"KVN1"
_DIGEST_BYTES: Final = 16

Descriptors = NDArray[np.uint64]
Marks = tuple[NDArray[np.bool_], NDArray[np.bool_]]


class NixlDescriptor(msgspec.Struct, frozen=True, tag="nixl-1"):
    """What a peer needs: the agent's name and metadata, (address, size in bytes) of each piece of memory, and where
    any of them is a device's, whose: (device, its number) of each piece."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    pieces: Annotated[tuple[tuple[Natural, Natural], ...], Meta(max_length=4096)]
    metadata: bytes
    devices: Annotated[tuple[tuple[Annotated[str, Meta(max_length=64)], Natural], ...], Meta(max_length=4096)] = ()


def digest_of(data: bytes) -> bytes:
    """To notice damage, not to authenticate."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def seal(body: bytes) -> bytes:
    """With length and digest in front. Raises TransportError when it is longer than a peer accepts."""
    return check_size(_MAGIC + len(body).to_bytes(8, "big") + digest_of(body) + body)


def unseal(peer: str, descriptor: bytes) -> bytes:
    """What is inside, once length and digest are right: nothing else may reach NIXL."""
    check_size(descriptor)
    head = len(_MAGIC) + 8 + _DIGEST_BYTES
    body = descriptor[head:]
    size = int.from_bytes(descriptor[len(_MAGIC) : len(_MAGIC) + 8], "big")
    is_whole = descriptor.startswith(_MAGIC) and len(body) == size
    if not is_whole or digest_of(body) != descriptor[head - _DIGEST_BYTES : head]:
        raise TransportError(
            f"the descriptor of peer {peer!r} is damaged or not one of nixl", found=f"{len(descriptor)} bytes"
        )
    return body


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows that NIXL gets at once, as it wants them: N x 3 on both sides, each side of one kind of memory."""

    local: Descriptors
    remote: Descriptors
    local_kind: MemoryKind = MemoryKind.DRAM
    remote_kind: MemoryKind = MemoryKind.DRAM


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """Of each piece of a side, ascending by address: the kind of its memory and the number of its device.

    Empty where all of it is host memory.
    """

    kinds: tuple[MemoryKind, ...] = ()
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, extents: Sequence[tuple[int, int]], devices: Sequence[tuple[str, int]]) -> Devices:
        """Raises TransportError for a device whose memory cannot be registered, or when there are not as many."""
        if not devices or all(device == HOST for device, _ in devices):
            return cls()
        if len(devices) != len(extents):
            raise TransportError("devices of other pieces", found=f"{len(devices)}", expected=f"{len(extents)}")
        order = sorted(range(len(extents)), key=extents.__getitem__)
        return cls(tuple(kind_of(devices[i][0]) for i in order), tuple(devices[i][1] for i in order))

    def mark(self, rows: Descriptors, pieces: Pieces) -> NDArray[np.bool_]:
        """Write the devices' numbers into the rows; which of them lie in a device's memory."""
        if not self.kinds:
            return np.zeros(len(rows), np.bool_)
        piece = pieces.locate(rows[:, 0], rows[:, 1], "a device")
        rows[:, 2] = np.array(self.numbers, np.uint64)[piece]
        return np.array([kind is MemoryKind.VRAM for kind in self.kinds])[piece]


def describe(address: Column, length: Column) -> Descriptors:
    """NIXL's form of rows: N x 3 (address, length, device), contiguous."""
    rows = np.zeros((len(address), 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = length
    return rows


def cut_by_kind(local: Descriptors, remote: Descriptors, on_device: Marks) -> deque[Part]:
    """Cut into parts like `cut`, each of one kind of memory per side; `on_device` marks the rows of both sides."""
    parts: deque[Part] = deque()
    for near, far in ((False, False), (False, True), (True, False), (True, True)):
        rows = np.flatnonzero((on_device[0] == near) & (on_device[1] == far))
        kinds = [MemoryKind.VRAM if is_device else MemoryKind.DRAM for is_device in (near, far)]
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
