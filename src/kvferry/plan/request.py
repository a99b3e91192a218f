"""The copies of one request: a program, two sets of block tables and a token range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BlockTableError, TooManyRowsError
from kvferry.plan.copies import Column, Copies
from kvferry.plan.layout import CacheGroup, TokenRange
from kvferry.plan.program import GroupProgram, Program, Section

__all__ = ["MAX_ROWS", "BlockTables", "copies_for", "num_rows"]

BlockTables = Sequence[Sequence[int]]
"""One list of block ids per cache group, in the group's order."""

# Three columns of 8 bytes, and as much again while they are computed: about 2 GB.
MAX_ROWS = 1 << 25

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """The rows of a section, each at the start of every run of places: one outer sum per column."""

    section: Section
    source_shift: Column
    target_shift: Column
    length: Column
    pieces: int


def copies_for(program: Program, source: BlockTables, target: BlockTables, tokens: TokenRange) -> Copies:
    """The rows that bring tokens `first <= t < last` (and every fixed-size state) to the target's blocks.

    Raises BlockTableError when block ids are out of range, repeated or too few, on either side, and TooManyRowsError
    when there would be more than MAX_ROWS rows.
    """
    if tokens.first < 0 or tokens.last < tokens.first:
        raise BlockTableError("a token range must not run backwards", found=f"[{tokens.first}, {tokens.last})")
    if (found := num_rows(program, tokens)) > MAX_ROWS:
        raise TooManyRowsError(
            "the request would move in too many small rows",
            found=f"{found:,}",
            expected=f"at most {MAX_ROWS:,}",
            hint="fewer tokens, or memory formats that are more alike",
        )
    tiles: list[_Tile] = []
    for group in program.groups:
        wanted = _retained(group, tokens)
        source_table = _checked(source, group.source_group, group.source, group, wanted, "source")
        target_table = _checked(target, group.target_group, group.target, group, wanted, "target")
        tiles.extend(_group_tiles(group, source_table, target_table, wanted))
    return _listed(tiles)


def num_rows(program: Program, tokens: TokenRange) -> int:
    """How many rows a range takes before neighbours are merged; tells without listing them."""
    return sum(
        sum(len(section) for section in sections) * len(at)
        for group in program.groups
        for sections, at in _places(group, _retained(group, tokens))
    )


def _retained(group: GroupProgram, tokens: TokenRange) -> TokenRange:
    """The part of a range that a sliding window still needs: the next token sees the window's last tokens only."""
    windows = [cache.ring_tokens for cache in (group.source, group.target) if cache.ring_tokens]
    if not windows:
        return tokens
    return TokenRange(max(tokens.first, tokens.last - (min(windows) - 1)), tokens.last)


def _places(group: GroupProgram, tokens: TokenRange) -> tuple[tuple[tuple[Section, ...], _Indices], ...]:
    """Each kind of section with the tokens at which its rows begin."""
    unit = group.unit_tokens
    start = min(-(-tokens.first // unit) * unit, tokens.last)
    stop = max(tokens.last // unit * unit, start)
    edges = (np.arange(tokens.first, start, dtype=np.int64), np.arange(stop, tokens.last, dtype=np.int64))
    units = np.arange(start, stop, unit, dtype=np.int64)
    return (group.units, units), (group.singles, np.concatenate(edges)), (group.fixed, np.zeros(1, np.int64))


def _group_tiles(group: GroupProgram, source: _Indices, target: _Indices, tokens: TokenRange) -> Iterator[_Tile]:
    for sections, at in _places(group, tokens):
        if sections and len(at):
            left, right = _located(group.source, source, at), _located(group.target, target, at)
            for section in sections:
                yield _tile(section, left, right)


def _located(cache: CacheGroup, table: _Indices, tokens: _Indices) -> tuple[_Indices, _Indices]:
    """Block id and slot of each token."""
    position = tokens % cache.ring_tokens if cache.ring_tokens else tokens
    return table[position // cache.block_tokens], position % cache.block_tokens


def _tile(section: Section, source: tuple[_Indices, _Indices], target: tuple[_Indices, _Indices]) -> _Tile:
    """A section at all its places. Places that follow one another on both sides, as adjacent blocks do, are one run:
    that does not depend on the row, so it is found once and not for every layer and head."""
    strides = section.strides
    source_shift = (source[0] * strides.source_block + source[1] * strides.source_token).astype(np.uint64)
    target_shift = (target[0] * strides.target_block + target[1] * strides.target_token).astype(np.uint64)
    length = np.uint64(section.length)
    follows = (np.diff(source_shift) == length) & (np.diff(target_shift) == length)
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    run_lengths = np.diff(first, append=len(source_shift)).astype(np.uint64) * length
    pieces = section.pieces * len(source_shift)
    return _Tile(section, source_shift[first], target_shift[first], run_lengths, pieces)


def _listed(tiles: list[_Tile]) -> Copies:
    """All rows of all tiles, written once into their final columns."""
    total = sum(len(tile.section) * len(tile.length) for tile in tiles)
    copies = Copies(
        source=np.empty(total, np.uint64),
        target=np.empty(total, np.uint64),
        length=np.empty(total, np.uint64),
        pieces=sum(tile.pieces for tile in tiles),
    )
    start = 0
    for tile in tiles:
        shape = len(tile.section), len(tile.length)
        stop = start + shape[0] * shape[1]
        np.add.outer(tile.section.source, tile.source_shift, out=copies.source[start:stop].reshape(shape))
        np.add.outer(tile.section.target, tile.target_shift, out=copies.target[start:stop].reshape(shape))
        copies.length[start:stop].reshape(shape)[:] = tile.length
        start = stop
    return copies


def _checked(
    tables: BlockTables, index: int, cache: CacheGroup, group: GroupProgram, tokens: TokenRange, side: str
) -> _Indices:
    """The blocks of one group that the range needs, as an array, or an error that names what is wrong with them."""
    if index >= len(tables):
        raise BlockTableError(f"{side} block table missing", found=f"{len(tables)} tables", expected=f"group {index}")
    table = np.asarray(tables[index], dtype=np.int64).reshape(-1)
    positions = min(tokens.last, cache.ring_tokens) if cache.ring_tokens else tokens.last
    num_needed = -(-positions // cache.block_tokens) if len(tokens) and group.units else 0
    num_needed = max(num_needed, 1 if group.fixed else 0)
    if len(table) < num_needed:
        raise BlockTableError(
            f"{side} group {index} has too few blocks for tokens up to {tokens.last}",
            found=f"{len(table)} blocks of {cache.block_tokens} tokens",
            expected=f"at least {num_needed}",
        )
    used = table[:num_needed]
    outside = used[(used < 0) | (used >= cache.num_blocks)]
    if len(outside):
        raise BlockTableError(
            f"{side} group {index} names a block that does not exist",
            found=f"block {outside[0]}",
            expected=f"0 <= block < {cache.num_blocks}",
        )
    ordered = np.sort(used)
    if np.any(ordered[1:] == ordered[:-1]):
        raise BlockTableError(f"{side} group {index} names a block twice", found=str(used[:16].tolist()))
    return used
