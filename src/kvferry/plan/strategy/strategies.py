"""The three ways in which the same rows can move: straight, scattered at the target, or packed at the source.

All three leave the same bytes in the target (invariant I7). What differs is how many rows the wire has to carry: as
many as there are, as many as there are runs at the source, or one per slot of staging memory.

Staged bytes lie back to back, in slots: slot k begins `k * slot_bytes` behind the staging memory's address, on both
sides. No row of any stage crosses a slot, and within each stage the staging addresses ascend. So the rows of one slot
are found with two binary searches, a slot can be on the wire while others are gathered and scattered, and a ring of
fewer slots than the transfer needs is a constant added to the addresses of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Column, Copies

_ADDRESS_LIMIT = 1 << 63


class Strategy(StrEnum):
    """How rows move, the simplest way first. `staged` has the rows of each stage, `cost_model` what they cost; whoever
    carries a transfer out asks for the properties, not for a name."""

    DIRECT = "direct"
    SCATTER = "scatter"
    PACK = "pack"

    @property
    def is_staged(self) -> bool:
        """Whether bytes arrive in slots of the target's staging memory, from which the target scatters them."""
        return self is not Strategy.DIRECT

    @property
    def source_gathers(self) -> bool:
        """Whether the source gathers into staging memory of its own and writes whole slots; otherwise rows are sent
        from the source's blocks."""
        return self is Strategy.PACK


class Side(StrEnum):
    """Who plans: a rank that carries out one side of a transfer has no use for the copies of the other."""

    SOURCE = "source"
    TARGET = "target"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Staging:
    """Staging memory of both ranks, each in its own address space, cut into slots of `slot_bytes`.

    Raises ConfigurationError when a slot is empty or an address cannot exist.
    """

    source_address: int
    target_address: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.slot_bytes < 1:
            raise ConfigurationError(
                "a staging slot must not be empty",
                found=f"{self.slot_bytes} bytes",
                expected="at least 1 byte",
                hint="slots of a few MiB suit most links",
            )
        if not all(0 <= address < _ADDRESS_LIMIT for address in (self.source_address, self.target_address)):
            raise ConfigurationError(
                "invalid address of staging memory",
                found=f"source {self.source_address:#x}, target {self.target_address:#x}",
                expected="0 <= address < 2**63",
            )


@dataclass(frozen=True, slots=True, eq=False)
class RegionStarts:
    """The addresses at which the registered regions of each side begin, ascending; empty when there is one region.

    Rows of different regions are never joined, even where one region begins at another's end. Regions are disjoint and
    hold each row whole, so a row's region follows from its address in whatever order the rows are sorted: no number
    per row needs to travel with the copies, and each side can be looked at alone.
    """

    source: Column
    target: Column


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """What happens in turn: `gather` within the source, `wire` between the ranks, `scatter` within the target.

    A stage without rows does not take place, or it is the other rank's and only one side is planned.
    """

    gather: Copies
    wire: Copies
    scatter: Copies


def staged(
    copies: Copies, strategy: Strategy, staging: Staging, starts: RegionStarts, side: Side = Side.BOTH
) -> Stages:
    """The stages of one strategy for these rows; those of `pack` that only the other side needs are left out."""
    if strategy is Strategy.DIRECT:
        return direct(copies)
    if strategy is Strategy.SCATTER:
        return scatter(copies, staging, starts)
    return pack(copies, staging, starts, side)


def direct(copies: Copies) -> Stages:
    """The wire carries every row to its place."""
    return Stages(gather=_nothing(), wire=copies, scatter=_nothing())


def scatter(copies: Copies, staging: Staging, starts: RegionStarts) -> Stages:
    """The wire reads what is contiguous at the source alone into staging, and the target puts each row in its place.

    Every byte is read once, and none that is not wanted: a gap between two rows ends a wire row.
    """
    rows = _sorted_by(copies, copies.source)
    return Stages(
        gather=_nothing(),
        wire=_to_staging(_laid(rows.source, rows, starts.source, staging.slot_bytes), staging.target_address),
        scatter=_from_staging(_laid(rows.target, rows, starts.target, staging.slot_bytes), staging.target_address),
    )


def pack(copies: Copies, staging: Staging, starts: RegionStarts, side: Side = Side.BOTH) -> Stages:
    """The source gathers into staging, the wire carries whole slots, and the target puts each row in its place.

    The order is that of the target's addresses: only one side can have long runs, and the target is the side that
    waits for them. It then writes forwards, in as few and as long rows as its format allows, and small pieces are
    cheaper to read (by the gather) than to write, where a part of a cache line must be fetched first.
    """
    rows = _sorted_by(copies, copies.target)
    slot_bytes = staging.slot_bytes
    gather = scatter = _nothing()
    if side is not Side.TARGET:
        gather = _to_staging(_laid(rows.source, rows, starts.source, slot_bytes), staging.source_address)
    if side is not Side.SOURCE:
        scatter = _from_staging(_laid(rows.target, rows, starts.target, slot_bytes), staging.target_address)
    return Stages(gather=gather, wire=_slots(copies.num_bytes, staging), scatter=scatter)


def source_runs(copies: Copies, starts: Column) -> int:
    """How many pieces are contiguous at the source alone. `starts`: where its regions begin, as in RegionStarts."""
    source, length = copies.source, copies.length
    if not _ascends(source):
        order = np.argsort(source)
        source, length = source[order], length[order]
    joined = source[:-1] + length[:-1] == source[1:]
    # The first row of each region never continues the row before it.
    first = np.searchsorted(source, starts)
    joined[first[(first > 0) & (first < len(source))] - 1] = False
    return len(copies) - int(np.count_nonzero(joined))


def _nothing() -> Copies:
    empty = np.zeros(0, np.uint64)
    return Copies(empty, empty, empty, 0)


def _ascends(column: Column) -> bool:
    return bool(np.all(column[:-1] <= column[1:]))


def _sorted_by(copies: Copies, column: Column) -> Copies:
    if _ascends(column):
        return copies
    # Rows come in runs that ascend, one per layer or head: a stable sort merges these.
    order = np.argsort(column, kind="stable")
    return Copies(copies.source[order], copies.target[order], copies.length[order], copies.pieces)


def _laid(address: Column, rows: Copies, starts: Column, slot_bytes: int) -> Copies:
    """One side of the rows, laid back to back: from `address` to an offset in staging memory.

    Rows that follow one another at the address are joined, except over the border of a region; then all are cut where
    a slot ends.
    """
    if not len(rows):
        return _nothing()
    length, end = rows.length, np.cumsum(rows.length)
    joins = np.flatnonzero(address[:-1] + length[:-1] == address[1:]) + 1
    if len(joins):
        # The first row of a region never continues the row before it.
        joins = joins[~np.isin(address[joins], starts)]
    if not len(joins):
        return _cut(Copies(address, end - length, length, rows.pieces), slot_bytes)
    is_first = np.ones(len(address), np.bool_)
    is_first[joins] = False
    offset = (end - length)[is_first]
    return _cut(Copies(address[is_first], offset, np.diff(offset, append=end[-1]), rows.pieces), slot_bytes)


def _cut(laid: Copies, slot_bytes: int) -> Copies:
    """The same rows, none of which crosses a slot. `laid.target` are the offsets, back to back from 0 on."""
    total = int(laid.target[-1] + laid.length[-1]) if len(laid) else 0
    if total <= slot_bytes:
        return laid
    cuts = np.arange(slot_bytes, total, slot_bytes, dtype=np.uint64)
    row = np.searchsorted(laid.target, cuts, side="right") - 1
    within = laid.target[row] < cuts
    row, cuts = row[within], cuts[within]
    source = np.insert(laid.source, row + 1, laid.source[row] + (cuts - laid.target[row]))
    offset = np.insert(laid.target, row + 1, cuts)
    edges = np.append(offset, np.uint64(total))
    return Copies(source, offset, edges[1:] - edges[:-1], laid.pieces)


def _slots(num_bytes: int, staging: Staging) -> Copies:
    """One row per slot; only the last may be shorter."""
    offset = np.arange(0, num_bytes, staging.slot_bytes, dtype=np.uint64)
    length = np.minimum(np.uint64(num_bytes) - offset, np.uint64(staging.slot_bytes))
    return Copies(
        offset + np.uint64(staging.source_address), offset + np.uint64(staging.target_address), length, len(offset)
    )


def _to_staging(laid: Copies, staging_address: int) -> Copies:
    return Copies(laid.source, laid.target + np.uint64(staging_address), laid.length, laid.pieces)


def _from_staging(laid: Copies, staging_address: int) -> Copies:
    return Copies(laid.target + np.uint64(staging_address), laid.source, laid.length, laid.pieces)
