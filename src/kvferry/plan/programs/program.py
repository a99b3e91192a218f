"""A route bound to two layouts: everything about a pair of ranks that does not depend on the request.

A section holds rows that differ only in where they start: the address of a row is its start plus the block's and the
slot's share, which the request's block tables give later (`copies_for`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TooManyRowsError
from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import TokenSet
from kvferry.plan.programs.copies import Column, Copies, firsts
from kvferry.plan.routing.route import Leg
from kvferry.plan.routing.selection import Selection

# For one block; a peer's strides decide how many there are. About 1 GB while they are sorted and merged.
MAX_SECTION_ROWS = 1 << 23


class Strides(NamedTuple):
    """Bytes from block to block and from token to token of a block, on both sides."""

    source_block: int
    source_token: int
    target_block: int
    target_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Rows of one length and with the same strides: they differ only in where they start.

    `source` and `target` are the addresses of each row in block 0, slot 0, as uint64; `pieces` is how many rows they
    were before neighbours were merged.
    """

    strides: Strides
    length: int
    source: Column
    target: Column
    pieces: int

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class GroupProgram:
    """What moves between one cache group of the source and one of the target: states with the same tokens.

    `state` is one of them: its window or chunks are those of all. `units` copy `unit_tokens` tokens at a time, from a
    multiple of `unit_tokens` on; `singles` one token; `fixed` the states without a token axis. Tokens are counted
    among `tokens`: see `Selection`.
    """

    source_group: int
    target_group: int
    source: CacheGroup
    target: CacheGroup
    state: State
    tokens: Selection
    unit_tokens: int
    units: tuple[Section, ...]
    singles: tuple[Section, ...]
    fixed: tuple[Section, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Everything that moves from one source rank to one target rank."""

    groups: tuple[GroupProgram, ...]


class _Dimension(NamedTuple):
    extent: int
    source_stride: int
    target_stride: int


class _Piece(NamedTuple):
    """One leg with its state and its two placements."""

    leg: Leg
    state: State
    source: Placement
    target: Placement


def bind(legs: Sequence[Leg], source: Layout, target: Layout) -> Program:
    """Bind the legs of one pair of ranks to the layouts of the two. Cost: one step per leg, not per block.

    Raises TooManyRowsError when the memory formats differ so much that one block falls apart into too many rows.
    """
    states, sources, targets = source.state_named(), source.placement_of(), target.placement_of()
    pieces = [_Piece(leg, states[leg.state], sources[leg.state], targets[leg.state]) for leg in legs]
    by_group: dict[_GroupKey, list[_Piece]] = {}
    for piece in pieces:
        by_group.setdefault(_group_key(piece), []).append(piece)
    groups: list[GroupProgram] = []
    num_rows = 0
    for key in sorted(by_group):
        groups.append(_bind_group(key, by_group[key], source, target))
        # Each is bounded on its own, but a peer decides how many groups there are.
        num_rows += sum(map(len, (*groups[-1].units, *groups[-1].singles, *groups[-1].fixed)))
        _check_rows(num_rows)
    return Program(tuple(groups))


class _GroupKey(NamedTuple):
    """Pieces with the same key move the same tokens of the same block tables."""

    source_group: int
    target_group: int
    per_token: bool
    window_tokens: int
    chunk_tokens: int
    tokens: tuple[int, tuple[Span, ...]]


def _group_key(piece: _Piece) -> _GroupKey:
    state, tokens = piece.state, piece.leg.tokens
    limits = state.per_token, state.window_tokens, state.chunk_tokens
    return _GroupKey(piece.source.group, piece.target.group, *limits, (tokens.period, tokens.spans))


def _bind_group(key: _GroupKey, pieces: list[_Piece], source: Layout, target: Layout) -> GroupProgram:
    source_group, target_group = source.groups[key.source_group], target.groups[key.target_group]
    selection = Selection.of(TokenSet(*key.tokens))
    unit_tokens = selection.unit(source_group, target_group)
    per_token, fixed = (pieces, []) if key.per_token else ([], pieces)
    return GroupProgram(
        source_group=key.source_group,
        target_group=key.target_group,
        source=source_group,
        target=target_group,
        state=pieces[0].state,
        tokens=selection,
        unit_tokens=unit_tokens,
        units=_sections(per_token, source, target, unit_tokens),
        singles=_sections(per_token, source, target, 1) if unit_tokens > 1 else (),
        fixed=_sections(fixed, source, target, 1),
    )


def _sections(pieces: Iterable[_Piece], source: Layout, target: Layout, num_tokens: int) -> tuple[Section, ...]:
    by_strides: dict[Strides, list[_Piece]] = {}
    for piece in pieces:
        by_strides.setdefault(_strides(piece, source, target, num_tokens), []).append(piece)
    sections: list[Section] = []
    for strides, found in by_strides.items():
        sections += _merged(strides, *_rows(found, source, target, num_tokens))
        _check_rows(sum(map(len, sections)))
    return tuple(sections)


def _strides(piece: _Piece, source: Layout, target: Layout, num_tokens: int) -> Strides:
    """Rows of whole blocks all begin at slot 0, so the distance of their tokens does not tell them apart."""
    whole = [
        num_tokens == layout.groups[p.group].kernel_tokens
        for layout, p in ((source, piece.source), (target, piece.target))
    ]
    return Strides(
        piece.source.block_stride,
        0 if whole[0] else piece.source.token_stride,
        piece.target.block_stride,
        0 if whole[1] else piece.target.token_stride,
    )


def _merged(strides: Strides, rows: Copies, regions: NDArray[np.int64]) -> Iterator[Section]:
    """Rows with their neighbours joined; that may leave rows of several lengths."""
    first = firsts(rows, regions)
    num_pieces = np.diff(first, append=len(rows))
    lengths = np.add.reduceat(rows.length, first)
    for length in np.unique(lengths):
        chosen = first[lengths == length]
        pieces = int(num_pieces[lengths == length].sum())
        yield Section(strides, int(length), rows.source[chosen], rows.target[chosen], pieces)


def _rows(pieces: list[_Piece], source: Layout, target: Layout, num_tokens: int) -> tuple[Copies, NDArray[np.int64]]:
    """All rows of some pieces in block 0, slot 0, and a number for the regions of each: a row never crosses those."""
    by_shape: dict[tuple[tuple[_Dimension, ...], int], list[_Piece]] = {}
    for piece in pieces:
        by_shape.setdefault((_dimensions(piece, num_tokens), piece.state.item_bytes), []).append(piece)
    listed = [(_runs(*shape), found) for shape, found in by_shape.items()]
    _check_rows(sum(len(runs.source) * len(found) for runs, found in listed))
    columns = [_expanded(runs, found, source, target) for runs, found in listed]
    source_column, target_column, length, regions = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.argsort(source_column, kind="stable")
    return Copies(source_column[order], target_column[order], length[order], len(order)), regions[order]


def _expanded(
    runs: _Runs, pieces: list[_Piece], source: Layout, target: Layout
) -> tuple[Column, Column, Column, NDArray[np.int64]]:
    """Source, target and length of every run of every piece, and a number for the pair of regions that it is in."""
    source_starts = [source.regions[p.source.region].address + _start(p.leg, p.source) for p in pieces]
    target_starts = [target.regions[p.target.region].address + _start(p.leg, p.target) for p in pieces]
    regions = [p.source.region * len(target.regions) + p.target.region for p in pieces]
    num_runs = len(runs.source)
    return (
        np.add.outer(np.array(source_starts, np.uint64), runs.source).ravel(),
        np.add.outer(np.array(target_starts, np.uint64), runs.target).ravel(),
        np.full(len(pieces) * num_runs, runs.length, np.uint64),
        np.repeat(np.array(regions, np.int64), num_runs),
    )


def _start(leg: Leg, placement: Placement) -> int:
    """Distance from the region's start to the first element of the leg's box, in block 0 and slot 0."""
    shifts = (
        (wanted.start - held.start) * stride
        for wanted, held, stride in zip(leg.box, placement.spans, placement.strides, strict=True)
    )
    return placement.offset + sum(shifts)


def _dimensions(piece: _Piece, num_tokens: int) -> tuple[_Dimension, ...]:
    spans: Sequence[Span] = piece.leg.box
    axes = [
        _Dimension(len(span), left, right)
        for span, left, right in zip(spans, piece.source.strides, piece.target.strides, strict=True)
    ]
    if piece.state.per_token:
        axes.append(_Dimension(num_tokens, piece.source.token_stride, piece.target.token_stride))
    return tuple(axes)


class _Runs(NamedTuple):
    """The parts of a box that are contiguous on both sides: their length in bytes and where each begins."""

    length: int
    source: Column
    target: Column


@lru_cache(maxsize=64)
def _runs(dimensions: tuple[_Dimension, ...], item_bytes: int) -> _Runs:
    """Walk the axes from the innermost while both sides stay contiguous, list the rest; the same for many layers."""
    remaining = [dimension for dimension in dimensions if dimension.extent > 1]
    length = item_bytes
    while inner := [d for d in remaining if d.source_stride == d.target_stride == length]:
        length *= inner[0].extent
        remaining.remove(inner[0])
    _check_rows(prod(dimension.extent for dimension in remaining))
    source = target = np.zeros(1, np.uint64)
    for dimension in sorted(remaining, key=lambda d: -d.source_stride):
        steps = np.arange(dimension.extent, dtype=np.uint64)
        source = np.add.outer(source, steps * np.uint64(dimension.source_stride)).ravel()
        target = np.add.outer(target, steps * np.uint64(dimension.target_stride)).ravel()
    return _Runs(length, source, target)


def _check_rows(num_rows: int) -> None:
    if num_rows > MAX_SECTION_ROWS:
        raise TooManyRowsError(
            "one block would need too many small rows",
            found=f"{num_rows:,}",
            expected=f"at most {MAX_SECTION_ROWS:,}",
            hint="smaller blocks, or more similar memory formats",
        )
