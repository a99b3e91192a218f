"""Compiled programs that take units out of an array and put them into it, for a few numbers of units each.

An array that units are put into is donated: its memory is the result's, and no second cache is ever made. Units come
and go as integers of the elements' size, so that no bit of a floating-point number changes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvferry.errors import TransportError
from kvferry.staging.jax_arrays.units import size_for, sizes_of
from kvferry.transport.registered_memory import Offsets, View

BITS: Final = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
PINNED: Final = "pinned_host"


class ArrayKind(NamedTuple):
    """What programs know of an array of one device: nothing that changes when it is donated."""

    shape: tuple[int, ...]
    dtype: Any
    where: SingleDeviceSharding

    @classmethod
    def of(cls, array: jax.Array) -> ArrayKind:
        (device,) = array.sharding.device_set
        return cls(array.shape, array.dtype, SingleDeviceSharding(device))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def platform(self) -> str:
        (device,) = self.where.device_set
        return str(device.platform)

    @property
    def is_copied_by_puts(self) -> bool:
        """Whether there is a copy of the array while units are put.

        XLA's CPU platform computes with wider numbers where it only has to move these, which changes NaNs: there all of
        the array is moved, as integers.
        """
        is_float = jnp.issubdtype(self.dtype, jnp.floating)
        return bool(self.platform == "cpu" and is_float and self.dtype.itemsize < 4 and self.dtype != jnp.float16)


class _Program(NamedTuple):
    """What one is compiled for."""

    puts: bool
    kind: ArrayKind
    unit_bytes: int
    num_units: int


class Programs:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._compiled: dict[_Program, Callable[..., Any]] = {}
        self._compiling = threading.Lock()

    @property
    def num_compiled(self) -> int:
        """How many were compiled since this was made."""
        return len(self._compiled)

    def prepare(self, kind: ArrayKind, unit_bytes: int, sizes: Iterable[int]) -> None:
        """Compile for these numbers of units. Raises TransportError when the device's compiler fails."""
        for num_units, puts in product(sizes, (False, True)):
            self._program(_Program(puts, kind, unit_bytes, num_units))

    def format_of(self, kind: ArrayKind, unit_bytes: int) -> Any:
        """In which memory of its device an array has to lie for them, and in which order its elements. Raises like
        `prepare`."""
        program: Any = self._program(_Program(False, kind, unit_bytes, sizes_of(unit_bytes)[0]))
        return program.input_formats[0][0]

    def take(self, kind: ArrayKind, numbers: Offsets, unit_bytes: int) -> Callable[[jax.Array], jax.Array]:
        """What begins to take units out of an array; the result has them in the host's memory, and more behind them.
        Raises TransportError when the device's compiler fails."""
        num_units = size_for(len(numbers), unit_bytes)
        program = self._program(_Program(False, kind, unit_bytes, num_units))
        placed = _placed(numbers, num_units, kind, 0)
        return lambda array: program(array, placed)

    def put(
        self, kind: ArrayKind, numbers: Offsets, units: View, unit_bytes: int
    ) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        """What begins to put `units`, of which nothing may change any more, into an array, which is deleted by that: it
        returns the array that follows it, and what is ready when that is. Raises like `take`."""
        num_units = len(units)
        program = self._program(_Program(True, kind, unit_bytes, num_units))
        beyond = kind.num_bytes // unit_bytes
        placed = _placed(numbers, num_units, kind, beyond)
        bits = jax.device_put(units.view(np.dtype(BITS[kind.dtype.itemsize])), kind.where)
        return lambda array: program(array, placed, bits)

    def _program(self, wanted: _Program) -> Callable[..., Any]:
        if wanted not in self._compiled:
            with self._compiling:
                if wanted not in self._compiled:
                    self._compiled[wanted] = _compiled(wanted)
        return self._compiled[wanted]


def _placed(numbers: Offsets, num_units: int, kind: ArrayKind, filler: int) -> jax.Array:
    """On the array's device, with a filler in the place of each unit that is none."""
    filled = np.full(num_units, filler, np.int32)
    filled[: len(numbers)] = numbers
    return jax.device_put(filled, kind.where)


def _compiled(wanted: _Program) -> Callable[..., Any]:
    """Raises TransportError when the device's compiler fails."""
    kind = wanted.kind
    bits, unit_items = BITS[kind.dtype.itemsize], wanted.unit_bytes // kind.dtype.itemsize

    def as_bits(array: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(array, bits)

    def take(array: jax.Array, numbers: jax.Array) -> jax.Array:
        return jnp.take(as_bits(array).reshape(-1, unit_items), numbers, axis=0, mode="clip")

    def put(array: jax.Array, numbers: jax.Array, units: jax.Array) -> tuple[jax.Array, jax.Array]:
        if kind.is_copied_by_puts:
            held, new = as_bits(array), units
        else:
            held, new = array, jax.lax.bitcast_convert_type(units, array.dtype)
        # Numbers that lie beyond the array are dropped.
        following = held.reshape(-1, unit_items).at[numbers].set(new, mode="drop").reshape(array.shape)
        return jax.lax.bitcast_convert_type(following, array.dtype), numbers[0]

    array = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.where)
    numbers = jax.ShapeDtypeStruct((wanted.num_units,), jnp.int32, sharding=kind.where)
    units = jax.ShapeDtypeStruct((wanted.num_units, unit_items), bits, sharding=kind.where)
    try:
        if wanted.puts:
            lowered = jax.jit(put, donate_argnums=0).lower(array, numbers, units)
        else:
            lowered = jax.jit(take, out_shardings=_host_of(kind.where, PINNED)).lower(array, numbers)
        program: Callable[..., Any] = lowered.compile()
    except Exception as error:
        raise TransportError(
            "a program that copies cannot be compiled",
            found=f"{type(error).__name__}: {error}",
            expected=f"one for {kind.dtype.name}{list(kind.shape)} on {kind.platform}",
        ) from error
    return program


@cache
def _host_of(where: SingleDeviceSharding, memory_kind: str) -> SingleDeviceSharding:
    """This kind of memory, if a program of the device can write there. JAX 0.8 names it on CPUs, and cannot."""
    (device,) = where.device_set
    if all(memory.kind != memory_kind for memory in device.addressable_memories()):
        return where
    host = SingleDeviceSharding(device, memory_kind=memory_kind)
    one = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=where)
    try:
        lowered = jax.jit(jnp.negative, out_shardings=host).lower(one)
        lowered.compile()
    except jax.errors.JaxRuntimeError:
        return where
    return host
