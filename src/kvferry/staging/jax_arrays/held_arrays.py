"""The arrays of a cache, which its engine and the copies of transfers use in turn.

Whoever writes donates: the old array is deleted and there is a new one. So there is one place that knows the newest,
and one lock. It is held while programs are begun, and never while one is compiled, gets its units or runs: JAX runs
them in an order that suits what they read and write.
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
from kvferry.staging.jax_arrays.pieces import ArraySpec, PiecedArray
from kvferry.staging.jax_arrays.programs import BITS, ArrayKind, Programs
from kvferry.staging.jax_arrays.units import MAX_UNITS, sizes_of, units_of
from kvferry.transport.registered_memory import Offsets, View

FIRST_ADDRESS: Final = 1 << 48
"""Regions of arrays lie here or above, where no process has memory: their addresses are names, and nothing else."""
NOT_THESE: Final = "these are not the arrays of the cache"


class Place(NamedTuple):
    """One device's piece of an array."""

    rank: int
    array: int


@dataclass(slots=True)
class Turn:
    """The engine's turn: `arrays` are the newest, and those that it leaves there are the newest from then on."""

    arrays: tuple[jax.Array, ...]


class HeldArrays:
    """Each array has a region in the layout of each rank, in the same order, and each rank one device's piece of it.

    `units` are what is taken and put at a time, by rank and array.
    """

    def __init__(self, arrays: Sequence[jax.Array], layouts: Sequence[Layout]) -> None:
        """Raises ConfigurationError when arrays and layouts do not fit."""
        _check_are_different(arrays)
        self._arrays = tuple(map(PiecedArray, arrays))
        by_array = [[ArrayKind.of(piece) for piece in array.pieces()] for array in self._arrays]
        self.kinds = tuple(zip(*by_array, strict=True))
        _check(self.kinds, layouts)
        self.units = tuple(tuple(_units(layout)) for layout in layouts)
        self.programs = Programs()
        self._lock = threading.Lock()
        self._in_turn = 0

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Hold the arrays while the engine begins its next step. Raises ConfigurationError when other arrays are left,
        and within a turn of the same thread."""
        # Only this thread itself can have written its own name there.
        if self._in_turn == threading.get_ident():
            raise ConfigurationError(
                "a turn cannot be taken within a turn",
                found="a second one in the same thread",
                hint="do all that begins a step in one turn, and leave it",
            )
        with self._lock:
            given = tuple(array.whole() for array in self._arrays)
            turn = Turn(given)
            self._in_turn = threading.get_ident()
            try:
                yield turn
            finally:
                self._in_turn = 0
                if turn.arrays is not given:
                    self._take_in(tuple(turn.arrays))

    def prepare(self) -> None:
        """Compile all that copies need. Raises TransportError when the device's compiler fails, and ConfigurationError
        when arrays lie where its programs do not take them."""
        for rank, (kinds, units) in enumerate(zip(self.kinds, self.units, strict=True)):
            for number, (kind, found) in enumerate(zip(kinds, units, strict=True)):
                for unit in found:
                    self.programs.prepare(kind, unit, sizes_of(unit))
                _check_place(number, self._arrays[number].pieces()[rank], self.programs.format_of(kind, found[0]))

    def take(self, place: Place, numbers: Offsets, unit_bytes: int) -> jax.Array:
        """Begin to take units out of a piece; what comes back is on its way to the host. Raises TransportError when the
        piece is gone or nothing can be compiled."""
        begin = self.programs.take(self.kinds[place.rank][place.array], numbers, unit_bytes)
        with self._lock:
            taken = begin(self._piece(place))
        taken.copy_to_host_async()
        return taken

    def put(self, place: Place, numbers: Offsets, units: View, unit_bytes: int) -> jax.Array:
        """Begin to put units into a piece; what comes back is ready when they are there. Raises like `take`."""
        begin = self.programs.put(self.kinds[place.rank][place.array], numbers, units, unit_bytes)
        with self._lock:
            following, done = begin(self._piece(place))
            self._arrays[place.array].put(place.rank, following)
        return done

    def _piece(self, place: Place) -> jax.Array:
        pieces = self._arrays[place.array].pieces()
        if not pieces or pieces[place.rank].is_deleted():
            raise TransportError(
                "an array of the cache was donated, and what came of it is not known here",
                found=f"array {place.array} of rank {place.rank}, deleted",
                expected="in Turn.arrays, what the step has returned",
                hint="donate arrays of the cache only inside turn()",
            )
        return pieces[place.rank]

    def _take_in(self, arrays: tuple[jax.Array, ...]) -> None:
        if len(arrays) != len(self._arrays):
            raise ConfigurationError(NOT_THESE, found=f"{len(arrays)} arrays", expected=f"{len(self._arrays)}")
        _check_are_different(arrays)
        for number, (array, held) in enumerate(zip(arrays, self._arrays, strict=True)):
            if not held.spec.fits(found := ArraySpec.of(array)):
                raise ConfigurationError(NOT_THESE, found=f"array {number}: {found}", expected=str(held.spec))
        for array, held in zip(arrays, self._arrays, strict=True):
            held.replace(array)


def _check_are_different(arrays: Sequence[jax.Array]) -> None:
    """Raises ConfigurationError for an array in two places: it would be donated twice."""
    first: dict[int, int] = {}
    for number, array in enumerate(arrays):
        if (earlier := first.setdefault(id(array), number)) != number:
            raise ConfigurationError(
                NOT_THESE,
                found=f"array {number} is array {earlier} once more",
                expected="an array of its own for each region",
            )


def _check_place(number: int, piece: jax.Array, wanted: Any) -> None:
    """Raises ConfigurationError for a piece in another memory than programs take it from, or whose elements lie in
    another order. JAX does not say it of each."""
    expected, found = ((each.sharding.memory_kind, each.layout) for each in (wanted, piece.format))
    if any(None not in pair and pair[0] != pair[1] for pair in zip(found, expected, strict=True)):
        raise ConfigurationError(
            f"programs of the device do not take array {number} from where it lies",
            found="memory {}, {}".format(*found),
            expected="memory {}, {}".format(*expected),
            hint="leave memory and order of the cache's arrays to JAX: no memory_kind and no Layout of your own",
        )


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


def _units(layout: Layout) -> Iterator[tuple[int, ...]]:
    """What can be taken of each array. Raises ConfigurationError where that is nothing."""
    for number, region in enumerate(layout.regions):
        if not (units := units_of(layout, number)):
            raise ConfigurationError(
                f"array {number} consists of too many blocks",
                found=f"{region.size_bytes:,} bytes",
                expected=f"fewer than {MAX_UNITS:,} blocks",
                hint="give each layer an array of its own, or the blocks more tokens",
            )
        yield units


def _shown(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes[:4]) + (f" and {len(sizes) - 4} more" if len(sizes) > 4 else "")
