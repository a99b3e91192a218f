"""Rows between the arrays of one rank and memory of the host, such as a slot of staging memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvferry.errors import TransportError
from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.copies import Column, Copies
from kvferry.plan.programs.tiles import Tile, rows_of
from kvferry.staging.host_mover import host_regions
from kvferry.staging.jax_arrays.held_arrays import FIRST_ADDRESS, HeldArrays, Place
from kvferry.staging.jax_arrays.units import calls_for, numbered, size_for, unit_for
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import LocatedRows, Offsets, Regions, View
from kvferry.transport.rowcopy.gather_scatter import gather, scatter


class _Part(NamedTuple):
    """Units of one array, and where each lies in the host."""

    place: Place
    unit_bytes: int
    numbers: Offsets
    host: LocatedRows
    length: Offsets


class ArrayCopies:
    """Copies rows for the mover of one rank. `near` is memory of the host that rows may touch; it must stay mapped."""

    def __init__(self, held: HeldArrays, rank: int, layout: Layout, near: Sequence[Memory]) -> None:
        self._held, self._rank = held, rank
        self._host = host_regions(near)
        # Ascending by address, as regions are.
        self._order = sorted(range(len(layout.regions)), key=lambda at: layout.regions[at].address)
        self._regions = Regions.of([(region.address, region.size_bytes) for region in layout.regions])

    def __call__(self, tiles: Sequence[Tile], _: View | None) -> Iterator[None]:
        """Copy when iterated. Raises TransportError for rows that lie elsewhere, and when the arrays are gone or cannot
        be copied."""
        rows = rows_of(tiles)
        from_arrays, to_arrays = rows.source >= FIRST_ADDRESS, rows.target >= FIRST_ADDRESS
        if from_arrays.all() and not to_arrays.any():
            return self._gathered([*self._parts(rows.source, rows.target, rows)])
        if to_arrays.all() and not from_arrays.any():
            return self._scattered([*self._parts(rows.target, rows.source, rows)])
        raise TransportError(
            "these rows do not lie on both sides of an array",
            found=f"{int(from_arrays.sum())} of {len(rows)} begin in arrays, {int(to_arrays.sum())} end there",
            expected="all of one, and none of the other",
        )

    def _gathered(self, parts: list[_Part]) -> Iterator[None]:
        """Take all parts at once: they are on their way to the host while the first is copied."""
        taken = [self._held.take(part.place, part.numbers, part.unit_bytes) for part in parts]
        for part, units in zip(parts, taken, strict=True):
            scatter(np.asarray(units).reshape(-1).view(np.uint8), part.host, part.length)
            yield

    def _scattered(self, parts: list[_Part]) -> Iterator[None]:
        # Each is waited for, also when it is given up halfway or another one fails: nothing is written any more when a
        # copy has ended.
        with ExitStack() as begun:
            for part in parts:
                units = np.zeros((size_for(len(part.numbers), part.unit_bytes), part.unit_bytes), np.uint8)
                gather(part.host, part.length, units.reshape(-1))
                done = self._held.put(part.place, part.numbers, units, part.unit_bytes)
                begun.callback(done.block_until_ready)
                if self._held.kinds[part.place.rank][part.place.array].is_copied_by_puts:
                    # Else all arrays of a slot would be there twice at a time.
                    done.block_until_ready()
                yield

    def _parts(self, inside: Column, outside: Column, rows: Copies) -> Iterator[_Part]:
        """The parts of rows, each for one call. `inside` are their addresses in arrays, `outside` those in the host."""
        region = self._regions.locate(inside, rows.length, "this process (arrays)")
        for number in np.unique(region).tolist():
            which = np.flatnonzero(region == number)
            offset, length = inside[which] - self._regions.address[number], rows.length[which]
            place = Place(self._rank, self._order[number])
            unit = unit_for(offset, length, self._held.units[place.rank][place.array])
            numbers, row, at = numbered(offset, length, unit)
            address = outside[which][row] + (at * unit).astype(np.uint64)
            for some in calls_for(len(numbers), unit):
                lengths = np.full(len(numbers[some]), unit, np.uint64)
                located = self._host.located(address[some], lengths, "this process (host)")
                yield _Part(place, unit, numbers[some], located, lengths.view(np.int64))
