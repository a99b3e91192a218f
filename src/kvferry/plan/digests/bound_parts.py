"""A part of a digest bound to the layout of one rank: everything that does not depend on the request."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from kvferry.errors import RequestError
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.description.tokens import classes
from kvferry.plan.digests.subject import Part
from kvferry.plan.programs.copies import Column
from kvferry.plan.routing.route import contains
from kvferry.plan.routing.selection import Indices, Selection

# A state of fixed size is taken in pieces of at most this size: as many of its last axes as fit.
PIECE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Grid:
    """The bytes of one item (a token's box, or a piece of a state of fixed size) relative to where it begins.

    Runs of `run_bytes`, one at every point of a grid: `extents` points, `strides` bytes apart, the outermost first.
    """

    run_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of one item."""
        return self.run_bytes * prod(self.extents)

    @property
    def reach_bytes(self) -> int:
        """The distance from the first byte of an item to behind its last one, in bytes."""
        return self.run_bytes + sum((e - 1) * s for e, s in zip(self.extents, self.strides, strict=True))


class Shape(NamedTuple):
    """What states share if their items are found in the same way. `pieces` are the leading axes of states of fixed
    size: extents and strides, none for states with tokens."""

    group: int
    block_stride: int
    token_stride: int
    grid: Grid
    pieces: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class StateGroup:
    """States of a part with one shape: their numbers in the part, and where their boxes begin in block 0, slot 0."""

    shape: Shape
    places: Indices
    starts: Column


@dataclass(frozen=True, slots=True, eq=False)
class BoundPart:
    """A part without its range. `num_bytes` is its size for one token, or altogether where sizes are fixed.

    Where `compress_ratio` tokens share an entry, entries are counted."""

    per_token: bool
    compress_ratio: int
    selection: Selection
    groups: tuple[StateGroup, ...]
    num_bytes: int

    def numbers(self, part: Part) -> range:
        """The tokens that a part covers, as numbers of its selection."""
        return range(self.selection.num_before(part.seen.first), self.selection.num_before(part.seen.last))


def bind_part(part: Part, layout: Layout) -> BoundPart:
    """Raises RequestError for a state, box or tokens that this rank does not hold, LayoutError for tokens that are
    shared out too differently."""
    states, placements = layout.state_named(), layout.placement_of()
    alike: dict[Shape, list[tuple[int, int]]] = {}
    for place, name in enumerate(part.states):
        if name not in placements:
            raise RequestError("a digest of a state that this rank does not hold", found=name)
        state, placement = states[name], placements[name]
        _check_box(part, placement)
        _check_tokens(part, state, layout)
        alike.setdefault(_shape(part, state, placement), []).append((place, layout.address_of(placement, part.box)))
    kinds = {(states[name].per_token, states[name].compress_ratio) for name in part.states}
    if len(kinds) > 1:
        raise RequestError("a part of a digest mixes states that count other things: tokens, entries, or nothing")
    groups = [
        StateGroup(shape, np.array([place for place, _ in found]), np.array([start for _, start in found], np.uint64))
        for shape, found in alike.items()
    ]
    num_bytes = sum(states[name].num_bytes(part.box) for name in part.states)
    return BoundPart(*kinds.pop(), Selection.of(part.tokens), tuple(groups), num_bytes)


def _check_box(part: Part, placement: Placement) -> None:
    held = placement.spans
    if len(part.box) != len(held) or not contains(held, part.box):
        what = f"a digest of more of {placement.state} than this rank holds"
        raise RequestError(what, found=" x ".join(map(str, part.box)), expected=" x ".join(map(str, held)))


def _check_tokens(part: Part, state: State, layout: Layout) -> None:
    share = layout.groups[layout.placement_of()[state.name].group].share.tokens()
    if state.per_token and not all(holders for _, holders in classes(part.tokens, (share,))):
        what = f"a digest of tokens of {state.name} that this rank does not hold"
        raise RequestError(what, found=str(part.tokens), expected=str(share))


def _shape(part: Part, state: State, placement: Placement) -> Shape:
    extents, strides = tuple(map(len, part.box)), placement.strides
    inner = 0 if state.per_token else _first_of_piece(extents, state.item_bytes)
    grid = _grid(extents[inner:], strides[inner:], state.item_bytes)
    pieces = extents[:inner], strides[:inner]
    return Shape(placement.group, placement.block_stride, placement.token_stride, grid, pieces)


def _first_of_piece(extents: tuple[int, ...], item_bytes: int) -> int:
    """The first axis that lies in a piece whole. It depends on the box alone: both sides cut alike."""
    num_bytes, axis = item_bytes, len(extents)
    while axis and num_bytes * extents[axis - 1] <= PIECE_BYTES:
        axis -= 1
        num_bytes *= extents[axis]
    return axis


def _grid(extents: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Grid:
    """Join the innermost axes while they are contiguous; list the others as they are declared."""
    axes = [(extent, stride) for extent, stride in zip(extents, strides, strict=True) if extent > 1]
    run_bytes = item_bytes
    while axes and axes[-1][1] == run_bytes:
        run_bytes *= axes.pop()[0]
    return Grid(run_bytes, tuple(extent for extent, _ in axes), tuple(stride for _, stride in axes))
