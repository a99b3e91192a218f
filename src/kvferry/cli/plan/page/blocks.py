"""How a rank's blocks lie in memory: from the whole region down to the cells of one block, in the order of bytes.

Only what is drawn is decided here; the browser gives every box its place and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from kvferry.cli.plan.page.matrix import Box, tokens_of
from kvferry.cli.units import TIMES, format_bytes, format_count_of

MAX_CELLS = 32
TRUNCATED = ("token", "layer", "block")
"""Axes of which the first few tell all; of the others a picture shows every part."""
# More labels than this have no room side by side.
MAX_WORDS, MAX_LABELS = 8, 40
GAP = 0.5


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: `stride` is the bytes from one index to the next, `shown` are the indices that are drawn."""

    name: str
    size: int
    stride: float
    shown: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One piece: its index on each drawn axis, and its bytes. A gap stands for pieces that are not drawn."""

    at: tuple[tuple[str, int], ...]
    num_bytes: float
    gap: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a block: the source rank whose bytes these are (-1: nobody moves them), and a tone by target.

    `width` is 1, but less for a gap, which stands for pieces that are not drawn.
    """

    source: int
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
    """The layout of one cache group at one side: `outer` axes, each the first item of the one before, around the cells
    of a block. The first row to copy is `row_percent` of the strip long, and longer with `row_open`."""

    side: str
    group: str
    outer: tuple[Axis, ...]
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
    """The strips of source and target for each cache group, as the first rank of each side with this group keeps it."""
    pairs = []
    for source in facts["layouts"]["source"]:
        for target in facts["layouts"]["target"]:
            if source["group"] == target["group"]:
                row = row_bytes(source, target, facts)
                pairs.append((_strip("source", source, facts, row), _strip("target", target, facts, row)))
    return pairs


def _strip(side: str, layout: Mapping[str, Any], facts: Mapping[str, Any], row: float) -> Strip:
    outer, inner = axes_of(layout)
    sources = CellSources(side, facts)
    drawn = drawn_axes(inner, sources.divided)
    pieces = list(leaves(drawn))
    groups = _groups(drawn, pieces, sources)
    end, is_open = _row_end(pieces, row)
    block = format_bytes(layout["block_stride"])
    has_paler = any(cell.tone for group in groups for cell in group.cells)
    paler = " Paler cells go to other target ranks." if has_paler else ""
    words = f" {TIMES} ".join(format_count_of(axis.size, _own_name(axis.name)) for axis in inner)
    return Strip(
        side=side,
        group=layout["group"],
        outer=tuple(outer),
        groups=groups,
        row_percent=100 * end / max(1.0, sum(group.width for group in groups)),
        row_words=f"one row: {format_bytes(row)}",
        row_open=is_open,
        words=f"{side} block: {words}, {block}",
        note=f"A block is {words} = {block}; a cell here is {format_bytes(pieces[0].num_bytes)}.{paler}",
    )


def _own_name(axis: str) -> str:
    """The name of an axis without its group and its extent: `head` for `recurrent.head_of_16`."""
    return axis.rpartition(".")[2].partition("_of_")[0]


def _groups(axes: list[Axis], pieces: list[Leaf], sources: CellSources) -> tuple[Group, ...]:
    """A group for each item of the outermost drawn axis, without a heading where that is the only axis."""
    has_labels = len(pieces) <= MAX_LABELS
    groups = []
    for number, (at, leaves_of_item) in enumerate(groupby(pieces, key=lambda leaf: leaf.at[:1])):
        cells = tuple(_cell(leaf, sources, has_labels) for leaf in leaves_of_item)
        label = ""
        if at and len(axes) > 1:
            # The first label says what is counted.
            name, index = at[0]
            label = f"{_own_name(name)} {index}" if number == 0 or len(axes[0].shown) <= MAX_WORDS else str(index)
        groups.append(Group(label, cells))
    return tuple(groups)


def _cell(leaf: Leaf, sources: CellSources, has_label: bool) -> Cell:
    if leaf.gap:
        return Cell(-1, 0, "…", GAP)
    source, tone = sources.pair(leaf)
    axis, at = leaf.at[-1] if leaf.at else ("", 0)
    label = str(at + sources.firsts.get(axis, 0)) if has_label else ""
    return Cell(source, min(tone, 3) if sources.side == "source" else 0, label)


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


def axes_of(layout: Mapping[str, Any]) -> tuple[list[Axis], list[Axis]]:
    """The outer axes down to the block, and the axes inside a block."""
    names, sizes = layout["order"], layout["sizes"]
    at = names.index("block") + 1 if "block" in names else 0
    inside = prod(sizes[at:])
    stride = layout["block_stride"] / max(1, inside) if layout["block_stride"] else 1.0
    if layout["token_stride"] and "token" in names:
        stride = layout["token_stride"] / prod(sizes[names.index("token") + 1 :])
    axes = []
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        known = {"token": layout["token_stride"], "block": layout["block_stride"]}.get(name) or stride
        axes.append(Axis(name, size, float(known)))
        stride = known * size
    axes.reverse()
    return axes[:at], axes[at:] or [Axis("block", 1, float(layout["block_stride"]))]


def row_bytes(source: Mapping[str, Any], target: Mapping[str, Any], facts: Mapping[str, Any]) -> float:
    """How many of the bytes that the first pair moves to target rank 0 are contiguous in a block of both sides."""
    pair = next((pair for pair in facts["pairs"] if pair["target_rank"] == 0), None)
    if pair is None:
        return 0.0
    token_words = {pair["tokens"], *(facts[side]["ranks"][0]["tokens"] for side in ("source", "target"))}
    box, left, right = Box.of_pair(pair), axes_of(source)[1], axes_of(target)[1]
    length = right[-1].stride if right else 0.0
    for mine, theirs in zip(reversed(left), reversed(right), strict=False):
        if mine.name != theirs.name:
            break
        moved = [last - first for name, first, last in box.spans if name == mine.name]
        count = min([mine.size, theirs.size, *moved])
        if mine.name == "token" and len(token_words) > 1:
            count = box.tokens.last - box.tokens.first
        length *= count
        if count < max(mine.size, theirs.size):
            break
    return length


def drawn_axes(inner: list[Axis], divided: frozenset[str]) -> list[Axis]:
    """The axes whose items become cells, few enough to be seen: not the last, if every rank has all of it."""
    axes = inner[:-1] if len(inner) > 1 and inner[-1].name not in divided else inner
    room = MAX_CELLS // max(1, prod(min(axis.size, 16) for axis in axes if axis.name not in TRUNCATED))
    drawn = []
    for axis in axes:
        bins = min(axis.size, 16)
        shown = [at * axis.size // bins for at in range(bins)]
        if axis.name in TRUNCATED:
            shown = list(range(min(bins, max(2, room))))
        drawn.append(replace(axis, shown=tuple(shown)))
    return drawn


def leaves(axes: list[Axis], at: tuple[tuple[str, int], ...] = ()) -> Iterator[Leaf]:
    """The pieces of a block, in memory order. A gap stands for the items of a truncated axis that are not drawn."""
    axis = axes[0]
    for index in axis.shown:
        here = (*at, (axis.name, index))
        if len(axes) > 1:
            yield from leaves(axes[1:], here)
        else:
            share = 1 if axis.name in TRUNCATED else axis.size / len(axis.shown)
            yield Leaf(here, axis.stride * share, gap=False)
    if axis.name in TRUNCATED and len(axis.shown) < axis.size:
        yield Leaf(at, 0.0, gap=True)


class CellSources:
    """The source of each cell's bytes, by the pairs of rank 0 at one side. `divided` are the axes that ranks share."""

    def __init__(self, side: str, facts: Mapping[str, Any]) -> None:
        rank = facts[side]["ranks"][0]
        mine = [pair for pair in facts["pairs"] if pair[f"{side}_rank"] == rank["rank"]]
        self.side, self._tokens = side, tokens_of(rank["tokens"])
        self.firsts = {axis: span[0] for axis, span in rank["axes"].items()}
        self._boxes = [(pair["source_rank"], Box.of_pair(pair)) for pair in mine]
        self.divided = frozenset(self.firsts) | {axis for _, box in self._boxes for axis, _, _ in box.spans}

    def pair(self, leaf: Leaf) -> tuple[int, int]:
        """(source rank, index of the pair among those of this rank); (-1, 0) when nobody moves it."""
        for index, (source, box) in enumerate(self._boxes):
            if all(self._holds(box, axis, at) for axis, at in leaf.at):
                return source, index
        return -1, 0

    def _holds(self, box: Box, axis: str, at: int) -> bool:
        if axis == "token":
            return self._tokens.nth(at) in box.tokens
        spans = [(first, last) for name, first, last in box.spans if name == axis]
        logical = at + self.firsts.get(axis, 0)
        return not spans or any(first <= logical < last for first, last in spans)
