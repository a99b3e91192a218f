"""One array of the cache: whole for its engine, and in pieces, one for each rank's device, for copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from kvferry.errors import ConfigurationError


class ArraySpec(NamedTuple):
    """What stays as it is when an array is donated and another follows it. `layout` is None where JAX does not say how
    the elements lie, as it does not of a deleted array."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    layout: Any

    @classmethod
    def of(cls, array: jax.Array) -> ArraySpec:
        return cls(array.shape, array.dtype, array.sharding, array.format.layout)

    def fits(self, other: ArraySpec) -> bool:
        """Whether an array of the other kind may follow one of this."""
        is_alike = (self.shape, self.dtype) == (other.shape, other.dtype) and self._lies_like(other)
        return is_alike and bool(self.sharding.is_equivalent_to(other.sharding, len(self.shape)))

    def _lies_like(self, other: ArraySpec) -> bool:
        return None in (self.layout, other.layout) or bool(self.layout == other.layout)

    def assemble(self, pieces: list[jax.Array]) -> jax.Array:
        """The array with these pieces; nothing is copied."""
        # A program's result belongs to no mesh: the engine's step would be compiled once more for it.
        if len(pieces) == 1 and pieces[0].sharding == self.sharding:
            return pieces[0]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, pieces)


class PiecedArray:
    """The newest array that is known here. It is cut into pieces, or assembled from them, when that is asked for."""

    def __init__(self, array: jax.Array) -> None:
        """Raises ConfigurationError when devices of another process have a part of it."""
        _check_is_here(array)
        self.spec = ArraySpec.of(array)
        self.replace(array)

    def replace(self, array: jax.Array) -> None:
        """Hold this array from now on; it must fit `spec`."""
        self._whole, self._is_older = array, False
        self._pieces: list[jax.Array] = []

    def whole(self) -> jax.Array:
        """The array as the engine knows it; nothing is copied. It is a deleted array if any part of it is gone."""
        if self._is_older and not any(piece.is_deleted() for piece in self._pieces):
            self._whole, self._is_older = self.spec.assemble(self._pieces), False
        if self._whole.is_deleted():
            # A step that is given it must raise an exception. JAX 0.10 ends the process where an array was donated on
            # several devices and was not deleted.
            self._whole.delete()
        return self._whole

    def pieces(self) -> list[jax.Array]:
        """The pieces of the array in the order of ranks; none when it is gone."""
        if not self._pieces and not self._whole.is_deleted():
            self._pieces = _pieces_of(self._whole)
        return self._pieces

    def put(self, rank: int, piece: jax.Array) -> None:
        """Replace the piece of a rank, which must have had one."""
        self._pieces[rank] = piece
        self._is_older = True


def _check_is_here(array: jax.Array) -> None:
    if not array.is_fully_addressable:
        raise ConfigurationError(
            "only arrays of this process's own devices can be held",
            found=f"an array on {len(array.sharding.device_set)} devices, {len(array.addressable_shards)} of them here",
            expected="one whose devices are all here",
            hint="hold this process's pieces, with the layouts of its own ranks",
        )


def _pieces_of(array: jax.Array) -> list[jax.Array]:
    if len(array.sharding.device_set) == 1:
        return [array]

    def first(shard: jax.Shard) -> tuple[tuple[int, ...], int]:
        return tuple(part.start or 0 for part in shard.index), shard.replica_id

    return [shard.data for shard in sorted(array.addressable_shards, key=first)]
