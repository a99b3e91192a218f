"""How a rank's blocks lie in memory: nested strips from the whole region down to the cells of one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvferry.cli.page_matrix import COLOURS, Box
from kvferry.cli.page_words import TIMES, bytes_words, many_words, tokens_of

__all__ = ["Cell", "Level", "Strip", "strips"]

WIDTH, GUTTER = 560.0, 104.0
LEVEL, LEVEL_PITCH, BLOCK = 16.0, 34.0, 34.0
MAX_ITEMS, MAX_CELLS = 20, 32
# A letter of a label is about so wide.
LETTER = 6.4
TRUNCATED = ("token", "layer", "block")
"""Axes of which the first few tell all; of the others a picture shows every part."""


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


@dataclass(frozen=True, slots=True)
class _Axis:
    """`stride` is the bytes from one index to the next; `shown` are the indices that are drawn."""

    name: str
    size: int
    stride: float
    shown: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Leaf:
    at: tuple[tuple[str, int], ...]
    num_bytes: float
    gap: bool


def strips(facts: Mapping[str, Any]) -> list[tuple[Strip, Strip]]:
    """Source and target of each cache group, as rank 0 of each side keeps it."""
    pairs = []
    for source in facts["layouts"]["source"]:
        for target in facts["layouts"]["target"]:
            if source["group"] == target["group"]:
                row = _row_bytes(source, target, facts)
                pairs.append((_strip("source", source, facts, row), _strip("target", target, facts, row)))
    return pairs


def _axes(layout: Mapping[str, Any]) -> tuple[list[_Axis], list[_Axis]]:
    """Outer axes down to the block, and those inside a block."""
    names, sizes = layout["order"], layout["sizes"]
    at = names.index("block") + 1 if "block" in names else 0
    inside = prod(sizes[at:])
    stride = layout["block_stride"] / max(1, inside) if layout["block_stride"] else 1.0
    if layout["token_stride"] and "token" in names:
        stride = layout["token_stride"] / prod(sizes[names.index("token") + 1 :])
    axes = []
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        known = {"token": layout["token_stride"], "block": layout["block_stride"]}.get(name) or stride
        axes.append(_Axis(name, size, float(known)))
        stride = known * size
    axes.reverse()
    return axes[:at], axes[at:]


def _row_bytes(source: Mapping[str, Any], target: Mapping[str, Any], facts: Mapping[str, Any]) -> float:
    """What follows without a gap in a block of both sides, of what the first pair moves to target rank 0."""
    pair = next((pair for pair in facts["pairs"] if pair["target_rank"] == 0), None)
    if pair is None:
        return 0.0
    box, left, right = Box.of_pair(pair), _axes(source)[1], _axes(target)[1]
    length = right[-1].stride if right else 0.0
    for mine, theirs in zip(reversed(left), reversed(right), strict=False):
        if mine.name != theirs.name:
            break
        moved = [last - first for name, first, last in box.spans if name == mine.name]
        count = min([mine.size, theirs.size, *moved])
        if mine.name == "token" and len({pair["tokens"], *_tokens_of_first(facts)}) > 1:
            count = box.tokens.last - box.tokens.first
        length *= count
        if count < max(mine.size, theirs.size):
            break
    return length


def _tokens_of_first(facts: Mapping[str, Any]) -> list[str]:
    return [facts[side]["ranks"][0]["tokens"] for side in ("source", "target")]


def _strip(side: str, layout: Mapping[str, Any], facts: Mapping[str, Any], row: float) -> Strip:
    outer, inner = _axes(layout)
    levels = _levels(outer)
    drawn = _drawn(inner)
    leaves = list(_leaves(drawn))
    y = 8 + LEVEL_PITCH * len(levels) + 14
    cells = _cells(leaves, _Painter.of(side, facts))
    end, is_open = _row_end(leaves, cells, row)
    block_bytes = layout["block_stride"]
    per_cell = bytes_words(leaves[0].num_bytes) if leaves else ""
    words = f" {TIMES} ".join(many_words(axis.size, axis.name) for axis in inner)
    return Strip(
        side=side,
        group=layout["group"],
        height=y + BLOCK + 30,
        levels=tuple(levels),
        y=y,
        groups=_groups(drawn, cells),
        cells=tuple(cells),
        row_end=end,
        row_words=f"one row: {bytes_words(row)}",
        row_open=is_open,
        words=f"{side} block: {words}, {bytes_words(block_bytes)}",
        note=f"A block is {words} = {bytes_words(block_bytes)}; a cell here is {per_cell}.",
    )


def _levels(outer: list[_Axis]) -> list[Level]:
    levels = []
    for index, axis in enumerate(outer):
        more = axis.size > MAX_ITEMS
        items = min(axis.size, MAX_ITEMS)
        note = f"{bytes_words(axis.stride)} each"
        width = (WIDTH - GUTTER) / (items + (1 if more else 0))
        levels.append(Level(8 + LEVEL_PITCH * index, f"{axis.name} {TIMES} {axis.size:,}", note, width, items, more))
    return levels


def _drawn(inner: list[_Axis]) -> list[_Axis]:
    """The axes whose items become cells: all but the last, which is one row of elements; few enough to be seen."""
    axes = inner[:-1] if len(inner) > 1 else inner
    divided = [min(axis.size, 16) for axis in axes if axis.name not in TRUNCATED]
    room = MAX_CELLS // max(1, prod(divided))
    drawn = []
    for axis in axes:
        if axis.name in TRUNCATED:
            count = min(axis.size, max(2, min(room, 16)))
            drawn.append(_Axis(axis.name, axis.size, axis.stride, tuple(range(count))))
        else:
            bins = min(axis.size, 16)
            drawn.append(_Axis(axis.name, axis.size, axis.stride, tuple(at * axis.size // bins for at in range(bins))))
    return drawn


def _leaves(axes: list[_Axis], at: tuple[tuple[str, int], ...] = ()) -> Iterator[_Leaf]:
    """In memory order. A gap stands for the items of a truncated axis that are not drawn."""
    axis = axes[0]
    for index in axis.shown:
        here = (*at, (axis.name, index))
        if len(axes) > 1:
            yield from _leaves(axes[1:], here)
        else:
            share = 1 if axis.name in TRUNCATED else axis.size / len(axis.shown)
            yield _Leaf(here, axis.stride * share, gap=False)
    if axis.name in TRUNCATED and len(axis.shown) < axis.size:
        yield _Leaf(at, 0.0, gap=True)


@dataclass(frozen=True, slots=True)
class _Painter:
    """Whose bytes a cell holds, from the pairs of rank 0 at one side."""

    side: str
    firsts: Mapping[str, int]
    tokens: str
    boxes: tuple[tuple[int, int, Box], ...]

    @classmethod
    def of(cls, side: str, facts: Mapping[str, Any]) -> _Painter:
        rank = facts[side]["ranks"][0]
        firsts = {axis: span[0] for axis, span in rank["axes"].items()}
        mine = [pair for pair in facts["pairs"] if pair[f"{side}_rank"] == rank["rank"]]
        boxes = [(pair["source_rank"], pair["target_rank"], Box.of_pair(pair)) for pair in mine]
        return cls(side, firsts, rank["tokens"], tuple(boxes))

    def pair(self, leaf: _Leaf) -> tuple[int, int]:
        """(source rank, index of the pair among those of this rank); (-1, 0) when nobody moves it."""
        for index, (source, _, box) in enumerate(self.boxes):
            if all(self._holds(box, axis, at) for axis, at in leaf.at):
                return source, index
        return -1, 0

    def _holds(self, box: Box, axis: str, at: int) -> bool:
        if axis == "token":
            return tokens_of(self.tokens).nth(at) in box.tokens
        spans = [(first, last) for name, first, last in box.spans if name == axis]
        logical = at + self.firsts.get(axis, 0)
        return not spans or any(first <= logical < last for first, last in spans)


def _cells(leaves: list[_Leaf], painter: _Painter) -> list[Cell]:
    num_gaps = sum(leaf.gap for leaf in leaves)
    # A gap is half as wide as a cell, but never too thin for its dots.
    gap = max(10.0, 0.5 * WIDTH / max(1, len(leaves))) if num_gaps else 0.0
    width = (WIDTH - gap * num_gaps) / max(1, len(leaves) - num_gaps)
    cells, x = [], 0.0
    for leaf in leaves:
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


def _groups(axes: list[_Axis], cells: list[Cell]) -> tuple[Group, ...]:
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


def _row_end(leaves: list[_Leaf], cells: list[Cell], row: float) -> tuple[float, bool]:
    """Where the first row ends, and whether it goes on behind what is drawn."""
    end, left = 0.0, row
    for leaf, cell in zip(leaves, cells, strict=True):
        if leaf.gap:
            return cell.x + cell.width, left > 0.5
        end = cell.x + cell.width * min(1.0, left / leaf.num_bytes)
        left -= leaf.num_bytes
        if left < 0.5:
            return end, False
    return end, left >= 0.5
