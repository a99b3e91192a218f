"""How a rank's blocks lie in memory: from the whole region down to the cells of one block, in the order of bytes.

Only what is drawn is decided here; the browser gives every box its place and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvferry.cli.plan.page.matrix import COLOURS
from kvferry.cli.plan.page.memory import Axis, CellSources, Leaf, axes_of, drawn_axes, leaves, row_bytes
from kvferry.cli.units import TIMES, format_bytes, format_count_of

MAX_ITEMS = 20
# More labels than this have no room side by side.
MAX_WORDS, MAX_LABELS = 8, 40
GAP = 0.5


@dataclass(frozen=True, slots=True)
class Level:
    """One outer axis: its items side by side, of which the first is opened into the next level."""

    name: str
    note: str
    items: int
    more: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a block: the source rank whose bytes these are (-1: nobody moves them), and which target's.

    `width` is 1, but less for a gap: that stands for pieces that are not drawn.
    """

    source: int
    colour: int
    tone: int
    label: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """Cells under one heading: a token, or a head."""

    label: str
    cells: tuple[Cell, ...]

    @property
    def width(self) -> float:
        return sum(cell.width for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Strip:
    """The layout of one cache group at one side. The first row to copy is `row_percent` of the strip long, and longer
    with `row_open`."""

    side: str
    group: str
    levels: tuple[Level, ...]
    groups: tuple[Group, ...]
    row_percent: float
    row_words: str
    row_open: bool
    words: str
    note: str

    @property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group.cells]


def strips(facts: Mapping[str, Any]) -> list[tuple[Strip, Strip]]:
    """Source and target of each cache group, as rank 0 of each side keeps it."""
    pairs = []
    for source in facts["layouts"]["source"]:
        for target in facts["layouts"]["target"]:
            if source["group"] == target["group"]:
                row = row_bytes(source, target, facts)
                pairs.append((_strip("source", source, facts, row), _strip("target", target, facts, row)))
    return pairs


def _strip(side: str, layout: Mapping[str, Any], facts: Mapping[str, Any], row: float) -> Strip:
    outer, inner = axes_of(layout)
    sources = CellSources.of(side, facts)
    drawn = drawn_axes(inner, sources.divided)
    pieces = list(leaves(drawn))
    groups = _groups(drawn, pieces, sources)
    end, is_open = _row_end(pieces, row)
    block = format_bytes(layout["block_stride"])
    paler = (
        " Paler cells go to other target ranks." if any(cell.tone for group in groups for cell in group.cells) else ""
    )
    words = f" {TIMES} ".join(format_count_of(axis.size, _own_name(axis.name)) for axis in inner)
    return Strip(
        side=side,
        group=layout["group"],
        levels=tuple(_level(axis) for axis in outer),
        groups=groups,
        row_percent=100 * end / max(1.0, sum(group.width for group in groups)),
        row_words=f"one row: {format_bytes(row)}",
        row_open=is_open,
        words=f"{side} block: {words}, {block}",
        note=f"A block is {words} = {block}; a cell here is {format_bytes(pieces[0].num_bytes)}.{paler}",
    )


def _own_name(axis: str) -> str:
    """Inside its group, and beside no other: `recurrent.head_of_16` is the head."""
    return axis.rpartition(".")[2].partition("_of_")[0]


def _level(axis: Axis) -> Level:
    name, note = f"{axis.name} {TIMES} {axis.size:,}", f"{format_bytes(axis.stride)} each"
    return Level(name, note, min(axis.size, MAX_ITEMS), axis.size > MAX_ITEMS)


def _groups(axes: list[Axis], pieces: list[Leaf], sources: CellSources) -> tuple[Group, ...]:
    """One for each item of the outermost axis that is drawn; without a heading where that is the only one."""
    has_labels = len(pieces) <= MAX_LABELS
    groups = []
    for number, (at, leaves_of_item) in enumerate(groupby(pieces, key=lambda leaf: leaf.at[:1])):
        cells = tuple(_cell(leaf, sources, has_labels) for leaf in leaves_of_item)
        label = ""
        if at and len(axes) > 1:
            # The first says what is counted.
            name, index = at[0]
            label = f"{_own_name(name)} {index}" if number == 0 or len(axes[0].shown) <= MAX_WORDS else str(index)
        groups.append(Group(label, cells))
    return tuple(groups)


def _cell(leaf: Leaf, sources: CellSources, has_label: bool) -> Cell:
    if leaf.gap:
        return Cell(-1, 0, 0, "…", GAP)
    source, tone = sources.pair(leaf)
    axis, at = leaf.at[-1] if leaf.at else ("", 0)
    label = str(at + sources.firsts.get(axis, 0)) if has_label else ""
    return Cell(source, source % COLOURS, min(tone, 3) if sources.side == "source" else 0, label)


def _row_end(pieces: list[Leaf], row: float) -> tuple[float, bool]:
    """Where the first row ends, in cells, and whether it goes on behind what is drawn."""
    end, left = 0.0, row
    for leaf in pieces:
        if leaf.gap:
            return end + GAP, left > 0.5
        end += min(1.0, left / leaf.num_bytes)
        left -= leaf.num_bytes
        if left < 0.5:
            return end, False
    return end, left >= 0.5
