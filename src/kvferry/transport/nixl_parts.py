"""What goes to a peer and to NIXL: the sealed descriptor, and rows as NIXL's arrays, cut into parts."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.transport.descriptors import Natural, check_size
from kvferry.transport.pieces import Column

__all__ = ["PART_BYTES", "PART_ROWS", "Descriptors", "NixlDescriptor", "cut", "describe", "digest_of", "seal", "unseal"]

# A part takes about 10 ms at 2 µs per descriptor and 8 GB/s.
PART_ROWS = 4096
PART_BYTES = 64 << 20

_MAGIC: Final = b"KVN1"
_DIGEST_BYTES: Final = 16

Descriptors = NDArray[np.uint64]


class NixlDescriptor(msgspec.Struct, frozen=True, tag="nixl-1"):
    """What a peer needs: the agent's name and metadata, and (address, size in bytes) of each piece of memory."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    pieces: Annotated[tuple[tuple[Natural, Natural], ...], Meta(max_length=4096)]
    metadata: bytes


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


def describe(address: Column, length: Column) -> Descriptors:
    """NIXL's form of rows: N x 3 (address, length, device), contiguous."""
    rows = np.zeros((len(address), 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = length
    return rows


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
