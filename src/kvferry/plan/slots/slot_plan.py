"""A request cut into slots of staging memory: what is gathered, sent and scattered for each.

Source and target find the same slots, each by itself, from the two programs, block tables and token ranges that both
know; so what they tell each other about a slot is its number and where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from kvferry.errors import RequestError
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.span import MAX_STOP
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.copies import Column, Copies
from kvferry.plan.programs.program import Program
from kvferry.plan.programs.request import Ranges, bytes_at, copies_for, places_for, volume
from kvferry.plan.programs.stretches import Stretch, even_stretches, stretch_tokens, unit_tokens
from kvferry.plan.programs.tiles import Tile, plain
from kvferry.plan.slots.packed_slots import packed
from kvferry.plan.strategy.strategies import Side, Stages, Strategy, staged

MAX_SLOTS = 1 << 10
"""The most slots of one stretch. A single block, or state, that needs more slots than this is not worth staging; a
peer says how large slots are, and each is a record here, which takes time to make."""


TOGETHER = 16
"""So many stretches are planned at once."""

MAX_ROWS_TOGETHER = 1 << 20
"""If they have so many rows, each is planned by itself."""

_FROM_THE_START: Column = np.zeros(1, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """What happens in turn: `gather` within the source, `wire` between the ranks, `scatter` within the target.

    What does not take place is empty, and so is what only the other side needs. In staging memory all addresses count
    from the slot's beginning.
    """

    num_bytes: int
    gather: tuple[Tile, ...]
    wire: Copies
    scatter: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StagedRequest:
    """What moves, and how it is cut: a slot has `slot_bytes` at most."""

    program: Program
    source_tables: BlockTables
    target_tables: BlockTables
    ranges: Ranges
    strategy: Strategy
    slot_bytes: int


class SlotPlan:
    """The slots of a request, stretch after stretch; each stretch is planned when it is looked at, and packed ones
    with some that follow, as far as the first `num_ready` tokens reach.

    Of a packed slot only the copies of one `side` are planned, if only they are needed.
    """

    def __init__(self, request: StagedRequest, side: Side, num_ready: int = MAX_STOP) -> None:
        self._request = request
        self._side = side
        self._num_ready = num_ready
        most = stretch_tokens(request.program, request.slot_bytes)
        self.stretches: tuple[Stretch, ...] = even_stretches(request.ranges, most, unit_tokens(request.program))
        self._planned = lru_cache(maxsize=2)(self._plan)

    @property
    def num_tokens(self) -> int:
        """So many tokens have to be computed for all of it."""
        return max((tokens.last for tokens in self._request.ranges), default=0)

    @cached_property
    def num_bytes(self) -> int:
        """What all slots have together. Raises what `volume` raises."""
        return volume(self._request.program, self._request.ranges)[1]

    def forget(self) -> None:
        """Give back the memory of what has been planned: whoever keeps the plan needs no more slots of it."""
        self._planned.cache_clear()

    def tokens_for(self, number: int) -> int:
        """How many tokens have to be computed for one stretch."""
        return min(self.stretches[number].tokens.last, self.num_tokens)

    def slots(self, number: int) -> tuple[Slot, ...]:
        """The slots of one stretch: one, unless a single block or a state of fixed size does not fit into it; none
        when nothing of it moves between these two ranks.

        Raises what `copies_for` raises, and RequestError when a stretch has more than `MAX_SLOTS`.
        """
        together = self._together(number)
        return self._planned(together)[number - together.start]

    @cached_property
    def _num_together(self) -> int:
        """One, where a peer may have chosen slots or memory with which a stretch is millions of rows, or many slots."""
        if self.num_bytes > len(self.stretches) * self._request.slot_bytes:
            return 1
        request, few = self._request, (self.stretches[0], self.stretches[len(self.stretches) // 2], self.stretches[-1])
        most = max(volume(request.program, request.ranges, stretch)[0] for stretch in few)
        return TOGETHER if most <= MAX_ROWS_TOGETHER // TOGETHER else 1

    def _together(self, number: int) -> range:
        """The stretches that are planned with one: the first alone, since somebody waits for it."""
        if not self._request.strategy.source_gathers or number == 0:
            return range(number, number + 1)
        start = number - (number - 1) % self._num_together
        stop = min(start + self._num_together, len(self.stretches))
        while stop - 1 > number and self.tokens_for(stop - 1) > self._num_ready:
            stop -= 1
        return range(start, stop)

    def _plan(self, numbers: range) -> tuple[tuple[Slot, ...], ...]:
        request, stretches = self._request, self.stretches[numbers.start : numbers.stop]
        if request.strategy.source_gathers:
            tables = request.source_tables, request.target_tables
            places = places_for(request.program, tables, request.ranges, stretches)
            num_bytes = bytes_at(places, len(stretches))
            self._check_slots(max(num_bytes))
            if found := packed(places, len(stretches), request.program.starts, self._side):
                return tuple(map(self._packed, stretches, found, num_bytes))
        return tuple(self._slots(self._sorted(stretch)) for stretch in stretches)

    def _packed(self, stretch: Stretch, tiles: tuple[Tile, ...], num_bytes: int) -> tuple[Slot, ...]:
        """The one slot of a stretch of which something moves; several where it does not fit."""
        if num_bytes > self._request.slot_bytes:
            return self._slots(self._sorted(stretch))
        wire = Copies(_FROM_THE_START, _FROM_THE_START, np.array([num_bytes], np.uint64), 1)
        gather, scatter = (tiles, ()) if self._side is Side.SOURCE else ((), tiles)
        return (Slot(num_bytes, gather, wire, scatter),) if num_bytes else ()

    def _sorted(self, stretch: Stretch) -> Stages:
        """The stages of a stretch of which every row is looked at."""
        request = self._request
        copies = copies_for(request.program, request.source_tables, request.target_tables, request.ranges, stretch)
        self._check_slots(copies.num_bytes)
        return staged(copies, request.strategy, request.slot_bytes, request.program.starts, self._side)

    def _check_slots(self, num_bytes: int) -> None:
        if num_bytes > MAX_SLOTS * self._request.slot_bytes:
            raise RequestError(
                "staging slots are too small for this cache",
                found=f"{num_bytes:,} bytes that stay together, in slots of {self._request.slot_bytes:,}",
                expected=f"at most {MAX_SLOTS:,} slots",
            )

    def _slots(self, stages: Stages) -> tuple[Slot, ...]:
        size, total = self._request.slot_bytes, stages.wire.num_bytes
        return tuple(
            _slot(stages, self._request.strategy, first, min(size, total - first)) for first in range(0, total, size)
        )


def any_tables(source: Layout, num_tokens: int) -> BlockTables:
    """Block tables of a source that a target may plan `pack` with, before it knows the real ones or they are complete:
    where bytes lie in a packed slot depends on where they go to, not on where they come from."""
    return tuple(
        tuple(number % group.num_blocks for number in range(max(1, -(-num_tokens // group.block_tokens))))
        for group in source.groups
    )


def _slot(stages: Stages, strategy: Strategy, first: int, num_bytes: int) -> Slot:
    """Within each stage the staging addresses ascend, and no row crosses a slot."""

    def inside(rows: Copies, staging: Column) -> Copies:
        start, stop = np.searchsorted(staging, np.array([first, first + num_bytes], np.uint64)).tolist()
        return rows.select(slice(start, stop))

    gather, wire, scatter = stages.gather, stages.wire, stages.scatter
    # Packed bytes come out of a slot, runs of the source out of its blocks.
    wire_shift = -first if strategy.source_gathers else 0
    return Slot(
        num_bytes,
        gather=plain(inside(gather, gather.target).shifted(0, -first)),
        wire=inside(wire, wire.target).shifted(wire_shift, -first),
        scatter=plain(inside(scatter, scatter.source).shifted(-first, 0)),
    )
