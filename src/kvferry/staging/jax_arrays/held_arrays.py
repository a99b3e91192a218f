"""The arrays of a cache, which its engine and the copies of transfers use in turn.

Whoever writes donates: the old array is deleted and there is a new one. So there is one place that knows the newest,
and one lock, held while programs are begun and never while they run: what they read and write orders itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax

from kvferry.errors import ConfigurationError, TransportError
from kvferry.plan.description.layout import Layout
from kvferry.staging.jax_arrays.programs import BITS, ArrayKind, Programs
from kvferry.staging.jax_arrays.units import size_for, sizes_of, units_of
from kvferry.transport.registered_memory import Offsets, View

FIRST_ADDRESS: Final = 1 << 48
"""Regions of arrays lie here or above, where no process has memory: their addresses are names, and nothing else."""
NOT_THESE: Final = "these are not the arrays of the cache"


class ArraySpec(NamedTuple):
    """What stays as it is when an array is donated and another follows it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding

    @classmethod
    def of(cls, array: jax.Array) -> ArraySpec:
        return cls(array.shape, array.dtype, array.sharding)

    def fits(self, other: ArraySpec) -> bool:
        """Whether an array of the other kind may follow one of this."""
        is_alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return is_alike and bool(self.sharding.is_equivalent_to(other.sharding, len(self.shape)))

    def assemble(self, pieces: list[jax.Array]) -> jax.Array:
        """The array with these pieces; nothing is copied."""
        if len(pieces) == 1:
            return pieces[0]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, pieces)


class Place(NamedTuple):
    """One device's piece of an array."""

    rank: int
    array: int


@dataclass(slots=True)
class Turn:
    """The engine's: `arrays` are the newest, and what it leaves there are the newest from then on."""

    arrays: tuple[jax.Array, ...]


class HeldArrays:
    """Each array has a region in the layout of each rank, in the same order, and each rank one device's piece of it.

    `units` are what is taken and put at a time, by rank and array.
    """

    def __init__(self, arrays: Sequence[jax.Array], layouts: Sequence[Layout]) -> None:
        """Raises ConfigurationError when arrays and layouts do not fit."""
        self._like = tuple(map(ArraySpec.of, arrays))
        self._take_in(tuple(arrays))
        self.kinds = tuple(tuple(map(ArrayKind.of, pieces)) for pieces in self._pieces)
        _check(self.kinds, layouts)
        self.units = tuple(
            tuple(units_of(layout, region) for region in range(len(layout.regions))) for layout in layouts
        )
        self.programs = Programs()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """For what begins the engine's next step. Raises ConfigurationError when other arrays are left."""
        with self._lock:
            turn = Turn(self._assembled())
            try:
                yield turn
            finally:
                if turn.arrays is not self._whole:
                    self._take_in(tuple(turn.arrays))

    def prepare(self) -> None:
        """Compile all that copies need. Raises TransportError when the device's compiler fails."""
        for kinds, units in zip(self.kinds, self.units, strict=True):
            for kind, unit in ((kind, unit) for kind, found in zip(kinds, units, strict=True) for unit in found):
                self.programs.prepare(kind, unit, sizes_of(unit))

    def take(self, place: Place, numbers: Offsets, unit_bytes: int) -> jax.Array:
        """Begin to take units out of a piece. Raises TransportError when that is gone or nothing can be compiled."""
        self._prepare(place, size_for(len(numbers), unit_bytes), unit_bytes)
        with self._lock:
            return self.programs.take(self._piece(place), numbers, unit_bytes)

    def put(self, place: Place, numbers: Offsets, units: View, unit_bytes: int) -> jax.Array:
        """Begin to put units into a piece; what comes back is ready when they are there. Raises like `take`."""
        self._prepare(place, len(units), unit_bytes)
        with self._lock:
            following, done = self.programs.put(self._piece(place), numbers, units, unit_bytes)
            self._pieces[place.rank][place.array] = following
            self._whole = ()
        return done

    def _prepare(self, place: Place, num_units: int, unit_bytes: int) -> None:
        """The engine must not wait for a compiler: the lock is not held here."""
        kind = self.kinds[place.rank][place.array]
        self.programs.prepare(kind, unit_bytes, (num_units,))

    def _piece(self, place: Place) -> jax.Array:
        piece = self._pieces[place.rank][place.array]
        if piece.is_deleted():
            raise TransportError(
                "an array of the cache was donated, and what came of it is not known here",
                found=f"array {place.array} of rank {place.rank}, deleted",
                expected="in Turn.arrays, what the step has returned",
                hint="donate arrays of the cache only inside turn()",
            )
        return piece

    def _take_in(self, arrays: tuple[jax.Array, ...]) -> None:
        if len(arrays) != len(self._like):
            raise ConfigurationError(NOT_THESE, found=f"{len(arrays)} arrays", expected=f"{len(self._like)}")
        for number, (array, like) in enumerate(zip(arrays, self._like, strict=True)):
            if not like.fits(found := ArraySpec.of(array)):
                raise ConfigurationError(NOT_THESE, found=f"array {number}: {found}", expected=str(like))
        by_array = [_pieces_of(array) for array in arrays]
        self._pieces = [list(of_rank) for of_rank in zip(*by_array, strict=True)]
        self._whole = arrays

    def _assembled(self) -> tuple[jax.Array, ...]:
        """The arrays as the engine knows them; nothing is copied."""
        if not self._whole:
            self._whole = tuple(
                spec.assemble([of_rank[number] for of_rank in self._pieces]) for number, spec in enumerate(self._like)
            )
        return self._whole


def _pieces_of(array: jax.Array) -> list[jax.Array]:
    """One for each device, in the order of what they have of the array: that of ranks."""
    if not array.is_fully_addressable:
        raise ConfigurationError(
            "only arrays of this process's own devices can be held",
            found=f"an array on {len(array.sharding.device_set)} devices, {len(array.addressable_shards)} of them here",
            expected="one whose devices are all here",
            hint="hold this process's pieces, with the layouts of its own ranks",
        )
    if len(array.sharding.device_set) == 1:
        return [array]

    def first(shard: jax.Shard) -> tuple[tuple[int, ...], int]:
        return tuple(part.start or 0 for part in shard.index), shard.replica_id

    return [shard.data for shard in sorted(array.addressable_shards, key=first)]


def _check(kinds: Sequence[Sequence[ArrayKind]], layouts: Sequence[Layout]) -> None:
    if len(kinds) != len(layouts):
        raise ConfigurationError(
            "the arrays' mesh and the layouts are not of equally many ranks",
            found=f"pieces on {len(kinds)} devices",
            expected=f"{len(layouts)}, one for each layout",
        )
    for rank, (pieces, layout) in enumerate(zip(kinds, layouts, strict=True)):
        sizes, wanted = [kind.num_bytes for kind in pieces], [region.size_bytes for region in layout.regions]
        if sizes != wanted:
            raise ConfigurationError(
                f"the arrays are not the regions of the layout of rank {rank}",
                found=f"pieces of {_shown(sizes)} bytes",
                expected=f"{_shown(wanted)}, one array for each region and in the same order",
            )
        if unknown := [kind.dtype.name for kind in pieces if kind.dtype.itemsize not in BITS]:
            raise ConfigurationError("elements of this size cannot be moved", found=unknown[0], expected="1 to 8 bytes")
        if min(region.address for region in layout.regions) < FIRST_ADDRESS:
            raise ConfigurationError(
                "arrays of JAX have no addresses, and must not seem to have those of the host's memory",
                found=f"a region at {layout.regions[0].address:#x}",
                expected=f"{FIRST_ADDRESS:#x} or above",
                hint="describe(…, kvferry.jax_caches.FIRST_ADDRESS)",
            )


def _shown(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes[:4]) + (f" and {len(sizes) - 4} more" if len(sizes) > 4 else "")
