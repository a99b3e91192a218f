"""The copies of one request: a program, two sets of block tables and a token range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BlockTableError, TooManyRowsError
from kvferry.plan.copies import Copies, concatenate, merge
from kvferry.plan.layout import CacheGroup, TokenRange
from kvferry.plan.program import GroupProgram, Program, Section

__all__ = ["MAX_ROWS", "BlockTables", "copies_for", "num_rows"]

BlockTables = Sequence[Sequence[int]]
"""One list of block ids per cache group, in the group's order."""

# Three columns of 8 bytes, and as much again while they are computed: about 2 GB.
MAX_ROWS = 1 << 25

_Indices = NDArray[np.int64]


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
    parts: list[Copies] = []
    for group in program.groups:
        wanted = _retained(group, tokens)
        source_table = _checked(source, group.source_group, group.source, group, wanted, "source")
        target_table = _checked(target, group.target_group, group.target, group, wanted, "target")
        parts.extend(_group_copies(group, source_table, target_table, wanted))
    return concatenate(parts)


def num_rows(program: Program, tokens: TokenRange) -> int:
    """How many rows a range takes before neighbours are merged; tells without listing them."""
    return sum(
        sum(len(section.rows) for section in sections) * len(at)
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


def _group_copies(group: GroupProgram, source: _Indices, target: _Indices, tokens: TokenRange) -> list[Copies]:
    return [
        _section_copies(section, _located(group.source, source, at), _located(group.target, target, at))
        for sections, at in _places(group, tokens)
        for section in sections
        if len(at)
    ]


def _located(cache: CacheGroup, table: _Indices, tokens: _Indices) -> tuple[_Indices, _Indices]:
    """Block id and slot of each token."""
    position = tokens % cache.ring_tokens if cache.ring_tokens else tokens
    return table[position // cache.block_tokens], position % cache.block_tokens


def _section_copies(section: Section, source: tuple[_Indices, _Indices], target: tuple[_Indices, _Indices]) -> Copies:
    """All rows of a section at all places: row after row, each over all places, so that adjacent blocks merge."""
    strides, rows = section.strides, section.rows
    source_shift = (source[0] * strides.source_block + source[1] * strides.source_token).astype(np.uint64)
    target_shift = (target[0] * strides.target_block + target[1] * strides.target_token).astype(np.uint64)
    num_places = len(source_shift)
    return merge(
        Copies(
            source=np.add.outer(rows.source, source_shift).ravel(),
            target=np.add.outer(rows.target, target_shift).ravel(),
            length=np.repeat(rows.length, num_places),
            pieces=rows.pieces * num_places,
        )
    )


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
    if len(np.unique(used)) != len(used):
        raise BlockTableError(f"{side} group {index} names a block twice", found=str(used[:16].tolist()))
    return used
