"""A route bound to two layouts: everything about a pair of ranks that does not depend on the request.

A section holds rows that differ only in where they start: the address of a row is its offset plus the block's and the
slot's share, which the request's block tables give later (`copies_for`). Offsets contain the region's address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.copies import Copies, merge
from kvferry.plan.layout import CacheGroup, Layout, Placement, State
from kvferry.plan.route import Leg
from kvferry.plan.span import Span

__all__ = ["GroupProgram", "Program", "Section", "Strides", "bind"]


class Strides(NamedTuple):
    """Bytes from block to block and from token to token of a block, on both sides."""

    source_block: int
    source_token: int
    target_block: int
    target_token: int


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Rows with the same strides in the same pair of regions; `rows` are relative to block 0, slot 0."""

    strides: Strides
    rows: Copies


@dataclass(frozen=True, slots=True, eq=False)
class GroupProgram:
    """What moves between one cache group of the source and one of the target.

    `units` copy `unit_tokens` tokens at a time, from a multiple of `unit_tokens` on; `singles` one token; `fixed` the
    states without a token axis.
    """

    source_group: int
    target_group: int
    source: CacheGroup
    target: CacheGroup
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
    """One leg with its two placements and the strides of the section it belongs to."""

    leg: Leg
    state: State
    source: Placement
    target: Placement

    @property
    def strides(self) -> Strides:
        return Strides(
            self.source.block_stride,
            self.source.token_stride,
            self.target.block_stride,
            self.target.token_stride,
        )


def bind(legs: Sequence[Leg], source: Layout, target: Layout) -> Program:
    """Bind the legs of one pair of ranks to the layouts of the two. Cost: one step per leg, not per block."""
    states, sources, targets = source.state_named(), source.placement_of(), target.placement_of()
    pieces = [_Piece(leg, states[leg.state], sources[leg.state], targets[leg.state]) for leg in legs]
    by_group: dict[tuple[int, int], list[_Piece]] = {}
    for piece in pieces:
        by_group.setdefault((piece.source.group, piece.target.group), []).append(piece)
    return Program(tuple(_bind_group(key, found, source, target) for key, found in sorted(by_group.items())))


def _bind_group(key: tuple[int, int], pieces: list[_Piece], source: Layout, target: Layout) -> GroupProgram:
    source_group, target_group = source.groups[key[0]], target.groups[key[1]]
    ring = source_group.ring_tokens or target_group.ring_tokens
    # In a ring a unit could wrap around in its middle, so rings go token by token; merging joins them again.
    unit_tokens = 1 if ring else gcd(source_group.block_tokens, target_group.block_tokens)
    per_token = [piece for piece in pieces if piece.state.per_token]
    fixed = [piece for piece in pieces if not piece.state.per_token]
    return GroupProgram(
        source_group=key[0],
        target_group=key[1],
        source=source_group,
        target=target_group,
        unit_tokens=unit_tokens,
        units=_sections(per_token, source, target, unit_tokens),
        singles=_sections(per_token, source, target, 1) if unit_tokens > 1 else (),
        fixed=_sections(fixed, source, target, 1),
    )


def _sections(pieces: Iterable[_Piece], source: Layout, target: Layout, num_tokens: int) -> tuple[Section, ...]:
    """One section per (strides, regions); rows never cross a region, so a registered region holds each one whole."""
    by_key: dict[tuple[Strides, int, int], list[_Piece]] = {}
    for piece in pieces:
        by_key.setdefault((piece.strides, piece.source.region, piece.target.region), []).append(piece)
    return tuple(
        Section(strides, _rows(found, source.regions[left].address, target.regions[right].address, num_tokens))
        for (strides, left, right), found in by_key.items()
    )


def _rows(pieces: list[_Piece], source_address: int, target_address: int, num_tokens: int) -> Copies:
    sources: list[NDArray[np.uint64]] = []
    targets: list[NDArray[np.uint64]] = []
    lengths: list[NDArray[np.uint64]] = []
    for piece in pieces:
        length, source_offsets, target_offsets = _runs(_dimensions(piece, num_tokens), piece.state.item_bytes)
        sources.append(source_offsets + np.uint64(source_address + _start(piece.leg, piece.source)))
        targets.append(target_offsets + np.uint64(target_address + _start(piece.leg, piece.target)))
        lengths.append(np.full(len(source_offsets), length, np.uint64))
    source, target, length_column = map(np.concatenate, (sources, targets, lengths))
    order = np.argsort(source, kind="stable")
    return merge(Copies(source[order], target[order], length_column[order], len(order)))


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


@lru_cache(maxsize=1024)
def _runs(dimensions: tuple[_Dimension, ...], item_bytes: int) -> tuple[int, NDArray[np.uint64], NDArray[np.uint64]]:
    """Length in bytes and start offsets of the runs of a box that are contiguous on both sides.

    The same for every layer of a model, hence the cache.
    """
    remaining = [dimension for dimension in dimensions if dimension.extent > 1]
    length = item_bytes
    while inner := [d for d in remaining if d.source_stride == d.target_stride == length]:
        length *= inner[0].extent
        remaining.remove(inner[0])
    source = target = np.zeros(1, np.uint64)
    for dimension in sorted(remaining, key=lambda d: -d.source_stride):
        steps = np.arange(dimension.extent, dtype=np.uint64)
        source = np.add.outer(source, steps * np.uint64(dimension.source_stride)).ravel()
        target = np.add.outer(target, steps * np.uint64(dimension.target_stride)).ravel()
    return length, source, target
