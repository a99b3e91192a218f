"""The three ways in which the same rows can move: straight, scattered at the target, or packed at the source.

All three leave the same bytes in the target (invariant I7). What differs is how many rows the wire has to carry: as
many as there are, as many as there are runs at the source, or one per slot of staging memory.

Staged bytes lie back to back, in slots of `slot_bytes`; an address in staging memory is an offset from the first slot,
on both sides. No row of any stage crosses a slot, and within each stage the staging addresses ascend. So the rows of
one slot are found with two binary searches, and a slot can be on the wire while others are gathered and scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvferry.plan.programs.copies import NOTHING, Column, Copies
from kvferry.plan.programs.program import RegionStarts


class Strategy(StrEnum):
    """How rows move, the simplest way first. `staged` has the rows of each stage, `cost_model` what they cost, and
    `kvferry.session.target.read_strategy` says when each is allowed; whoever carries a transfer out asks for the
    properties, not for a name. The name is said to sources, so a new one is a new wire version."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """What happens in turn: `gather` within the source, `wire` between the ranks, `scatter` within the target.

    A stage without rows does not take place, or it is the other side's.
    """

    gather: Copies
    wire: Copies
    scatter: Copies


def staged(copies: Copies, strategy: Strategy, slot_bytes: int, starts: RegionStarts, side: Side) -> Stages:
    """The stages of one strategy for these rows, as far as one side needs them."""
    if strategy.source_gathers:
        return pack(copies, slot_bytes, starts, side)
    if strategy.is_staged:
        return scatter(copies, slot_bytes, starts)
    return Stages(gather=NOTHING, wire=copies, scatter=NOTHING)


def scatter(copies: Copies, slot_bytes: int, starts: RegionStarts) -> Stages:
    """The wire reads what is contiguous at the source alone into staging, and the target puts each row in its place.

    Every byte is read once, and none that is not wanted: a gap between two rows ends a wire row.
    """
    rows = _sorted_by(copies, copies.source)
    return Stages(
        gather=NOTHING,
        wire=_laid(rows.source, rows, starts.source, slot_bytes),
        scatter=_reversed(_laid(rows.target, rows, starts.target, slot_bytes)),
    )


def pack(copies: Copies, slot_bytes: int, starts: RegionStarts, side: Side) -> Stages:
    """The source gathers into staging, the wire carries whole slots, and the target puts each row in its place.

    The order is that of the target's addresses: only one side can have long runs, and the target is the side that
    waits for them. It then writes forwards, in as few and as long rows as its format allows, and small pieces are
    cheaper to read (by the gather) than to write, where a part of a cache line must be fetched first.
    """
    rows = _sorted_by(copies, copies.target)
    # One row per slot; only the last may be shorter.
    offset = np.arange(0, copies.num_bytes, slot_bytes, dtype=np.uint64)
    length = np.minimum(np.uint64(copies.num_bytes) - offset, np.uint64(slot_bytes))
    wire = Copies(offset, offset, length, len(offset))
    if side is Side.SOURCE:
        return Stages(_laid(rows.source, rows, starts.source, slot_bytes), wire, NOTHING)
    return Stages(NOTHING, wire, _reversed(_laid(rows.target, rows, starts.target, slot_bytes)))


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


def _ascends(column: Column) -> bool:
    return bool(np.all(column[:-1] <= column[1:]))


def _sorted_by(copies: Copies, column: Column) -> Copies:
    if _ascends(column):
        return copies
    # Rows come in runs that ascend, one per layer or head: a stable sort merges these.
    return copies.select(np.argsort(column, kind="stable"))


def _laid(address: Column, rows: Copies, starts: Column, slot_bytes: int) -> Copies:
    """One side of the rows, laid back to back: from `address` to an offset in staging memory.

    Rows that follow one another at the address are joined, except over the border of a region; then all are cut where
    a slot ends.
    """
    if not len(rows):
        return NOTHING
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


def _reversed(laid: Copies) -> Copies:
    """Out of staging memory."""
    return Copies(laid.target, laid.source, laid.length, laid.pieces)
