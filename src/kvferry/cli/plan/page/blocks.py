"""How a rank's blocks lie in memory: nested strips from the whole region down to the cells of one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.cli.plan.page.matrix import COLOURS
from kvferry.cli.plan.page.memory import Axis, Leaf, Painter, axes_of, drawn_axes, leaves, row_bytes
from kvferry.cli.units import TIMES, format_bytes, format_count_of

WIDTH, GUTTER = 560.0, 104.0
LEVEL_PITCH, BLOCK = 34.0, 34.0
MAX_ITEMS = 20
# A letter of a label is about so wide.
LETTER = 6.4


@dataclass(frozen=True, slots=True)
class Level:
    """One outer axis: its items side by side, of which the first is opened into the next level."""

    y: float
    name: str
    note: str
    item: float
    items: int
    more: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One piece of a block in memory order: the source rank whose bytes these are (-1: none), and which target's."""

    x: float
    width: float
    source: int
    colour: int
    tone: int
    label: str


@dataclass(frozen=True, slots=True)
class Group:
    """Cells under one heading: a token, or a head."""

    x: float
    width: float
    label: str


@dataclass(frozen=True, slots=True)
class Strip:
    """The layout of one cache group at one side; `row` ends where the first row to copy ends."""

    side: str
    group: str
    height: float
    levels: tuple[Level, ...]
    y: float
    groups: tuple[Group, ...]
    cells: tuple[Cell, ...]
    row_end: float
    row_words: str
    row_open: bool
    words: str
    note: str


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
    levels = _levels(outer)
    painter = Painter.of(side, facts)
    drawn = drawn_axes(inner, painter.divided)
    pieces = list(leaves(drawn))
    y = 8 + LEVEL_PITCH * len(levels) + 14
    cells = _cells(pieces, painter)
    end, is_open = _row_end(pieces, cells, row)
    block = format_bytes(layout["block_stride"])
    paler = " Paler cells go to other target ranks." if any(cell.tone for cell in cells) else ""
    words = f" {TIMES} ".join(format_count_of(axis.size, axis.name) for axis in inner)
    return Strip(
        side=side,
        group=layout["group"],
        height=y + BLOCK + 30,
        levels=tuple(levels),
        y=y,
        groups=_groups(drawn, cells),
        cells=tuple(cells),
        row_end=end,
        row_words=f"one row: {format_bytes(row)}",
        row_open=is_open,
        words=f"{side} block: {words}, {block}",
        note=f"A block is {words} = {block}; a cell here is {format_bytes(pieces[0].num_bytes)}.{paler}",
    )


def _levels(outer: list[Axis]) -> list[Level]:
    levels = []
    for index, axis in enumerate(outer):
        more = axis.size > MAX_ITEMS
        items = min(axis.size, MAX_ITEMS)
        note = f"{format_bytes(axis.stride)} each"
        width = (WIDTH - GUTTER) / (items + (1 if more else 0))
        levels.append(Level(8 + LEVEL_PITCH * index, f"{axis.name} {TIMES} {axis.size:,}", note, width, items, more))
    return levels


def _cells(pieces: list[Leaf], painter: Painter) -> list[Cell]:
    num_gaps = sum(leaf.gap for leaf in pieces)
    # A gap is half as wide as a cell, but never too thin for its dots.
    gap = max(10.0, 0.5 * WIDTH / max(1, len(pieces))) if num_gaps else 0.0
    width = (WIDTH - gap * num_gaps) / max(1, len(pieces) - num_gaps)
    cells, x = [], 0.0
    for leaf in pieces:
        if leaf.gap:
            cells.append(Cell(x, gap, -2, 0, 0, "…"))
            x += gap
            continue
        source, tone = painter.pair(leaf)
        shade = min(tone, 3) if painter.side == "source" else 0
        axis, at = leaf.at[-1] if leaf.at else ("", 0)
        label = str(at + painter.firsts.get(axis, 0)) if width >= 13 else ""
        cells.append(Cell(x, width, source, source % COLOURS, shade, label))
        x += width
    return cells


def _groups(axes: list[Axis], cells: list[Cell]) -> tuple[Group, ...]:
    """Headings over the cells: the items of the outermost axis that is drawn."""
    if len(axes) < 2 or not cells:
        return ()
    axis = axes[0]
    per, groups, free = len(cells) // len(axis.shown), [], 0.0
    for number, index in enumerate(axis.shown):
        mine = cells[number * per : (number + 1) * per]
        x, end = mine[0].x, mine[-1].x + mine[-1].width
        # The first says what is counted, even where that hides its neighbours' numbers.
        label = f"{axis.name} {index}" if number == 0 or end - x > LETTER * len(f"{axis.name} {index}") else str(index)
        room = max(end - x, LETTER * len(label))
        fits = x >= free
        free = x + room if fits else free
        groups.append(Group(x, end - x, label if fits else ""))
    return tuple(groups)


def _row_end(pieces: list[Leaf], cells: list[Cell], row: float) -> tuple[float, bool]:
    """Where the first row ends, and whether it goes on behind what is drawn."""
    end, left = 0.0, row
    for leaf, cell in zip(pieces, cells, strict=True):
        if leaf.gap:
            return cell.x + cell.width, left > 0.5
        end = cell.x + cell.width * min(1.0, left / leaf.num_bytes)
        left -= leaf.num_bytes
        if left < 0.5:
            return end, False
    return end, left >= 0.5
