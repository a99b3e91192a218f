"""A route bound to two layouts: everything about a pair of ranks that does not depend on the request.

A section holds rows that differ only in where they start: the address of a row is its start plus the block's and the
slot's share, which the request's block tables give later (`copies_for`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TooManyRowsError
from kvferry.plan.description.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.description.tokens import TokenSet
from kvferry.plan.programs.copies import Column, Copies, firsts
from kvferry.plan.routing.route import Leg
from kvferry.plan.routing.selection import Indices, Selection

# The most rows of one block, as a peer's strides decide how many it has. About 1 GB while they are sorted and merged.
MAX_SECTION_ROWS = 1 << 23


class BlockStrides(NamedTuple):
    """Bytes from block to block and from token to token of a block."""

    block: int
    token: int

    def shifts(self, places: tuple[Indices, Indices]) -> Column:
        """Bytes from block 0, slot 0 to each (block, slot)."""
        block, slot = places
        return (block * self.block + slot * self.token).astype(np.uint64)


class Strides(NamedTuple):
    """The strides of a section, on both sides."""

    source: BlockStrides
    target: BlockStrides


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
    among `tokens`: see `Selection`. Of states that keep an entry for several tokens, entries are counted.
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
class RegionStarts:
    """The addresses at which the registered regions of each side begin, ascending; empty when there is one region.

    Rows of different regions are never joined, even where one region begins at another's end. Regions are disjoint and
    hold each row whole, so a row's region follows from its address in whatever order the rows are sorted: no number
    per row needs to travel with the copies, and each side can be looked at alone.
    """

    source: Column
    target: Column


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Everything that moves from one source rank to one target rank, and where their regions begin."""

    groups: tuple[GroupProgram, ...]
    starts: RegionStarts


class _Dimension(NamedTuple):
    extent: int
    source_stride: int
    target_stride: int


class _End(NamedTuple):
    """Where the box of a leg lies in one rank; `address` is that of its first element in block 0, slot 0."""

    placement: Placement
    cache: CacheGroup
    address: int


class _Piece(NamedTuple):
    """One leg with its state and where it begins and ends."""

    leg: Leg
    state: State
    source: _End
    target: _End


def bind(legs: Sequence[Leg], source: Layout, target: Layout) -> Program:
    """Bind the legs of one pair of ranks to the layouts of the two. Cost: one step per leg, not per block.

    Raises TooManyRowsError when the memory formats differ so much that one block falls apart into too many rows.
    """
    # Pieces of one group move the same tokens of the same block tables.
    by_group: dict[tuple[int, int, tuple[bool, int, int, int], TokenSet], list[_Piece]] = {}
    for piece in _pieces(legs, source, target):
        numbers = piece.source.placement.group, piece.target.placement.group
        by_group.setdefault((*numbers, piece.state.token_limits, piece.leg.tokens), []).append(piece)
    groups: list[GroupProgram] = []
    num_rows = 0
    for key in sorted(by_group):
        groups.append(_bind_group(by_group[key]))
        # Each group is bounded on its own, but a peer decides how many there are.
        num_rows += sum(map(len, (*groups[-1].units, *groups[-1].singles, *groups[-1].fixed)))
        _check_rows(num_rows)
    return Program(tuple(groups), region_starts(source, target))


def region_starts(source: Layout, target: Layout) -> RegionStarts:
    """Where the regions of two ranks begin."""
    starts = (sorted(region.address for region in layout.regions) for layout in (source, target))
    return RegionStarts(*(np.array(addresses, np.uint64) for addresses in starts))


def _pieces(legs: Sequence[Leg], source: Layout, target: Layout) -> Iterator[_Piece]:
    states, sources, targets = source.state_named(), source.placement_of(), target.placement_of()
    for leg in legs:
        ends = (_end(leg, layout, of[leg.state]) for layout, of in ((source, sources), (target, targets)))
        yield _Piece(leg, states[leg.state], *ends)


def _end(leg: Leg, layout: Layout, placement: Placement) -> _End:
    return _End(placement, layout.groups[placement.group], layout.address_of(placement, leg.box))


def _bind_group(pieces: list[_Piece]) -> GroupProgram:
    leg, state, source, target = pieces[0]
    tokens = Selection.of(leg.tokens)
    unit_tokens = tokens.unit(source.cache, target.cache)
    per_token, fixed = (pieces, []) if state.per_token else ([], pieces)
    return GroupProgram(
        source_group=source.placement.group,
        target_group=target.placement.group,
        source=source.cache,
        target=target.cache,
        state=state,
        tokens=tokens,
        unit_tokens=unit_tokens,
        units=_sections(per_token, unit_tokens),
        singles=_sections(per_token, 1) if unit_tokens > 1 else (),
        fixed=_sections(fixed, 1),
    )


def _sections(pieces: list[_Piece], num_tokens: int) -> tuple[Section, ...]:
    by_strides: dict[Strides, list[_Piece]] = {}
    for piece in pieces:
        strides = Strides(_strides(piece.source, num_tokens), _strides(piece.target, num_tokens))
        by_strides.setdefault(strides, []).append(piece)
    sections: list[Section] = []
    for strides, found in by_strides.items():
        sections += _merged(strides, *_rows(found, num_tokens))
        _check_rows(sum(map(len, sections)))
    return tuple(sections)


def _strides(end: _End, num_tokens: int) -> BlockStrides:
    """Rows of whole blocks all begin at slot 0, so the distance of their tokens does not tell them apart."""
    is_whole = num_tokens == end.cache.kernel_tokens
    return BlockStrides(end.placement.block_stride, 0 if is_whole else end.placement.token_stride)


def _merged(strides: Strides, rows: Copies, regions: NDArray[np.int64]) -> Iterator[Section]:
    """Rows with their neighbours joined; that may leave rows of several lengths."""
    first = firsts(rows, regions)
    num_pieces = np.diff(first, append=len(rows))
    lengths = np.add.reduceat(rows.length, first)
    for length in np.unique(lengths):
        chosen = first[lengths == length]
        pieces = int(num_pieces[lengths == length].sum())
        yield Section(strides, int(length), rows.source[chosen], rows.target[chosen], pieces)


def _rows(pieces: list[_Piece], num_tokens: int) -> tuple[Copies, NDArray[np.int64]]:
    """All rows of some pieces in block 0, slot 0, and a number for the regions of each: a row never crosses those."""
    by_shape: dict[tuple[tuple[_Dimension, ...], int], list[_Piece]] = {}
    for piece in pieces:
        by_shape.setdefault((_dimensions(piece, num_tokens), piece.state.item_bytes), []).append(piece)
    listed = [(_runs(*shape), found) for shape, found in by_shape.items()]
    _check_rows(sum(len(runs.source) * len(found) for runs, found in listed))
    columns = [_expanded(runs, found) for runs, found in listed]
    source, target, length, regions = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.argsort(source, kind="stable")
    return Copies(source, target, length, len(order)).select(order), regions[order]


def _expanded(runs: _Runs, pieces: list[_Piece]) -> tuple[Column, Column, Column, NDArray[np.int64]]:
    """Source, target and length of every run of every piece, and a number for the pair of regions that it is in."""
    sources = np.array([piece.source.address for piece in pieces], np.uint64)
    targets = np.array([piece.target.address for piece in pieces], np.uint64)
    regions = [(piece.source.placement.region << 32) + piece.target.placement.region for piece in pieces]
    num_runs = len(runs.source)
    return (
        np.add.outer(sources, runs.source).ravel(),
        np.add.outer(targets, runs.target).ravel(),
        np.full(len(pieces) * num_runs, runs.length, np.uint64),
        np.repeat(np.array(regions, np.int64), num_runs),
    )


def _dimensions(piece: _Piece, num_tokens: int) -> tuple[_Dimension, ...]:
    source, target = piece.source.placement, piece.target.placement
    extents, pairs = map(len, piece.leg.box), zip(source.strides, target.strides, strict=True)
    axes = [_Dimension(extent, *strides) for extent, strides in zip(extents, pairs, strict=True)]
    if piece.state.per_token:
        axes.append(_Dimension(num_tokens, source.token_stride, target.token_stride))
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
