"""Rows of this process's memory as the kernel takes them: many in one call, with no step of Python for each."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Column

Vectors = NDArray[np.uint64]
"""What the kernel calls iovec: N x 2, address and length."""

# The kernel takes no more in one call.
MAX_VECTORS: Final = 1024


def vectors_of(address: Column, length: Column) -> Vectors:
    """The rows, in their order."""
    vectors = np.empty((len(address), 2), np.uint64)
    vectors[:, 0] = address
    vectors[:, 1] = length
    return vectors


class RowStream:
    """Rows of this process's memory, one after another, as a stream of `num_bytes` bytes."""

    def __init__(self, address: Column, length: Column) -> None:
        self.address = address
        self.length = length
        self._vectors = vectors_of(address, length)
        self._ends = np.cumsum(length)

    @property
    def num_bytes(self) -> int:
        return int(self._ends[-1])

    def rest(self, num_moved: int) -> Vectors:
        """What follows the first `num_moved` bytes, as far as one call takes it."""
        first = int(np.searchsorted(self._ends, np.uint64(num_moved), side="right"))
        rest = self._vectors[first : first + MAX_VECTORS]
        skipped = np.uint64(num_moved) - (self._ends[first] - self.length[first])
        if skipped:
            rest = rest.copy()
            rest[0, 0] += skipped
            rest[0, 1] -= skipped
        return rest


class _MessageHeader(ctypes.Structure):
    """What the kernel calls msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def send(fd: int, vectors: Vectors, flags: int) -> int:
    """How many bytes of these a connected socket took. Raises OSError."""
    return _move(_SEND, fd, vectors, flags)


def receive(fd: int, vectors: Vectors, flags: int) -> int:
    """How many bytes of these came from a connected socket: 0 at its end. Raises OSError."""
    return _move(_RECEIVE, fd, vectors, flags)


def _move(call: Callable[..., int], fd: int, vectors: Vectors, flags: int) -> int:
    header = _MessageHeader(vectors=vectors.ctypes.data, num_vectors=len(vectors))
    while (moved := call(fd, ctypes.byref(header), flags)) < 0:
        # A signal that Python handles afterwards ends the call, nothing else.
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return moved


def _call(name: str) -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True)[name]
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    return call


_SEND: Final = _call("sendmsg")
_RECEIVE: Final = _call("recvmsg")
