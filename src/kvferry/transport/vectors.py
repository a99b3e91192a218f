"""Rows as the kernel takes them, and its calls that copy many of them at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Column

MAX_VECTORS: Final = 1024
"""The kernel takes no more rows in one call."""

Vectors = NDArray[np.uint64]
"""What the kernel calls iovec: N x 2, address and length."""

SystemCall = Callable[..., int]
"""Returns the number of bytes, or -1; `ctypes.get_errno` then says why."""


def vectors_of(address: Column, length: Column) -> Vectors:
    """A new array: whoever calls may change it."""
    return np.stack([address, length], axis=1)


def system_call(name: str, *arguments: type) -> SystemCall:
    """A function of the C library that returns how many bytes it has copied. Other threads run meanwhile.

    Raises TransportError where there is none of this name, or where addresses have no 64 bits.
    """
    library = ctypes.CDLL(None, use_errno=True)
    try:
        call = library[name]
    except AttributeError as error:
        raise TransportError(f"this system has no {name}", expected="Linux") from error
    if ctypes.sizeof(ctypes.c_void_p) != np.dtype(np.uint64).itemsize:
        raise TransportError(f"{name} needs 64-bit addresses")
    call.restype = ctypes.c_ssize_t
    call.argtypes = arguments
    return call
