"""A layout of the facts as axes with strides, the pieces of a block in memory order, and whose bytes they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvferry.cli.plan.page.matrix import Box
from kvferry.cli.plan.page.spans import tokens_of

MAX_CELLS = 32
TRUNCATED = ("token", "layer", "block")
"""Axes of which the first few tell all; of the others a picture shows every part."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`stride` is the bytes from one index to the next; `shown` are the indices that are drawn."""

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


def axes_of(layout: Mapping[str, Any]) -> tuple[list[Axis], list[Axis]]:
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
        axes.append(Axis(name, size, float(known)))
        stride = known * size
    axes.reverse()
    return axes[:at], axes[at:] or [Axis("block", 1, float(layout["block_stride"]))]


def row_bytes(source: Mapping[str, Any], target: Mapping[str, Any], facts: Mapping[str, Any]) -> float:
    """What follows without a gap in a block of both sides, of what the first pair moves to target rank 0."""
    pair = next((pair for pair in facts["pairs"] if pair["target_rank"] == 0), None)
    if pair is None:
        return 0.0
    box, left, right = Box.of_pair(pair), axes_of(source)[1], axes_of(target)[1]
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


def drawn_axes(inner: list[Axis], divided: frozenset[str]) -> list[Axis]:
    """The axes whose items become cells, few enough to be seen: not the last, if every rank has all of it."""
    axes = inner[:-1] if len(inner) > 1 and inner[-1].name not in divided else inner
    sizes = [min(axis.size, 16) for axis in axes if axis.name not in TRUNCATED]
    room = MAX_CELLS // max(1, prod(sizes))
    drawn = []
    for axis in axes:
        if axis.name in TRUNCATED:
            count = min(axis.size, max(2, min(room, 16)))
            drawn.append(Axis(axis.name, axis.size, axis.stride, tuple(range(count))))
        else:
            bins = min(axis.size, 16)
            drawn.append(Axis(axis.name, axis.size, axis.stride, tuple(at * axis.size // bins for at in range(bins))))
    return drawn


def leaves(axes: list[Axis], at: tuple[tuple[str, int], ...] = ()) -> Iterator[Leaf]:
    """In memory order. A gap stands for the items of a truncated axis that are not drawn."""
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


@dataclass(frozen=True, slots=True)
class CellSources:
    """Whose bytes a cell holds, from the pairs of rank 0 at one side."""

    side: str
    firsts: Mapping[str, int]
    tokens: str
    boxes: tuple[tuple[int, Box], ...]

    @classmethod
    def of(cls, side: str, facts: Mapping[str, Any]) -> CellSources:
        """For the first rank of a side."""
        rank = facts[side]["ranks"][0]
        firsts = {axis: span[0] for axis, span in rank["axes"].items()}
        mine = [pair for pair in facts["pairs"] if pair[f"{side}_rank"] == rank["rank"]]
        boxes = [(pair["source_rank"], Box.of_pair(pair)) for pair in mine]
        return cls(side, firsts, rank["tokens"], tuple(boxes))

    @property
    def divided(self) -> frozenset[str]:
        """The axes that ranks divide between them."""
        return frozenset(self.firsts) | {axis for _, box in self.boxes for axis, _, _ in box.spans}

    def pair(self, leaf: Leaf) -> tuple[int, int]:
        """(source rank, index of the pair among those of this rank); (-1, 0) when nobody moves it."""
        for index, (source, box) in enumerate(self.boxes):
            if all(self._holds(box, axis, at) for axis, at in leaf.at):
                return source, index
        return -1, 0

    def _holds(self, box: Box, axis: str, at: int) -> bool:
        if axis == "token":
            return tokens_of(self.tokens).nth(at) in box.tokens
        spans = [(first, last) for name, first, last in box.spans if name == axis]
        logical = at + self.firsts.get(axis, 0)
        return not spans or any(first <= logical < last for first, last in spans)
