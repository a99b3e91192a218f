"""The copies of one request: a program, two sets of block tables and a token range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import BlockTableError, TooManyRowsError
from kvferry.plan.description.span import MAX_STOP
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.blocks import Blocks, BlockTables, Owner, checked
from kvferry.plan.programs.copies import Copies, run_starts
from kvferry.plan.programs.program import GroupProgram, Program, Section
from kvferry.plan.programs.stretches import WHOLE, Stretch
from kvferry.plan.programs.tiles import Tile, rows_of
from kvferry.plan.routing.selection import Indices

Ranges = Sequence[TokenRange]
"""One range per cache group of the target."""

# Three columns of 8 bytes, and as much again while they are computed: about 2 GB.
MAX_ROWS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where rows of some sections begin: (kernel block, slot) of each place on both sides, and the number of the
    stretch that it belongs to."""

    sections: tuple[Section, ...]
    source: tuple[Indices, Indices]
    target: tuple[Indices, Indices]
    stretch: Indices


def copies_for(
    program: Program, source: BlockTables, target: BlockTables, ranges: Ranges, stretch: Stretch = WHOLE
) -> Copies:
    """The rows that bring tokens `first <= t < last` (and every fixed-size state) to the target's blocks.

    `ranges` has one range per cache group of the target, `stretch` says which part of all that is wanted. Only the
    blocks of tokens that move are looked at.

    Raises BlockTableError when a range runs backwards or block ids are no integers, out of range, repeated or too few,
    on either side, and TooManyRowsError when there would be more than MAX_ROWS rows.
    """
    places = places_for(program, (source, target), ranges, (stretch,))
    rows = rows_of([_tile(section, each) for each in places for section in each.sections])
    pieces = sum(section.pieces * len(each.stretch) for each in places for section in each.sections)
    return Copies(rows.source, rows.target, rows.length, pieces)


def places_for(
    program: Program, tables: tuple[BlockTables, BlockTables], ranges: Ranges, stretches: Sequence[Stretch]
) -> list[Places]:
    """Where the rows of some stretches, one after the other, begin; `tables` are those of the source and the target.

    Raises what `copies_for` raises.
    """
    numbers = [_all_numbers(program, ranges, stretch) for stretch in stretches]
    for stretch, at in zip(stretches, numbers, strict=True):
        _check_rows(sum(len(section) * times for section, times in _counted(program, at, stretch.is_last)))
    by_group = [list(at) for at in zip(*numbers, strict=True)]
    has_fixed = stretches[-1].is_last
    ends = [_ends(group, at, has_fixed) for group, at in zip(program.groups, by_group, strict=True)]
    blocks = _all_checked(program.groups, tables, ends)
    return [
        places
        for group, at, (left, right) in zip(program.groups, by_group, blocks, strict=True)
        for places in _group_places(group, left, right, at, has_fixed)
    ]


def bytes_at(places: Sequence[Places], num_stretches: int) -> list[int]:
    """How many bytes belong to each stretch."""
    found = np.zeros(num_stretches, np.int64)
    for each in places:
        num_bytes = sum(len(section) * section.length for section in each.sections)
        found += np.bincount(each.stretch, minlength=num_stretches) * num_bytes
    return found.tolist()


def _check_rows(num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise TooManyRowsError(
            "the request would need too many small rows",
            found=f"{num_rows:,}",
            expected=f"at most {MAX_ROWS:,}",
            hint="fewer tokens, or more similar memory formats",
        )


def _all_checked(
    groups: Sequence[GroupProgram], tables: tuple[BlockTables, BlockTables], all_ends: Sequence[Indices]
) -> list[tuple[Blocks, Blocks]]:
    """Both sides' blocks of every group. Raises one error that names everything that is wrong with them."""
    found: list[Blocks] = []
    wrong: list[BlockTableError] = []
    for group, ends in zip(groups, all_ends, strict=True):
        owners = (
            Owner("source", group.source_group, group.source),
            Owner("target", group.target_group, group.target),
        )
        for side, owner in zip(tables, owners, strict=True):
            try:
                found.append(checked(side, owner, ends))
            except BlockTableError as error:
                wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise BlockTableError("; ".join(dict.fromkeys(str(error) for error in wrong)))
    return list(zip(found[::2], found[1::2], strict=True))


def volume(program: Program, ranges: Ranges, stretch: Stretch = WHOLE) -> tuple[int, int]:
    """(rows, bytes) of a request before neighbours are merged; tells without listing them.

    Raises BlockTableError when a range runs backwards or is missing.
    """
    numbers = _all_numbers(program, ranges, stretch)
    counted = [(len(section) * times, section.length) for section, times in _counted(program, numbers, stretch.is_last)]
    return sum(rows for rows, _ in counted), sum(rows * length for rows, length in counted)


def seen(program: Program, ranges: Ranges) -> TokenRange:
    """The tokens from the first of which something moves to the last one, in whichever group.

    Raises BlockTableError when a range runs backwards or is missing.
    """
    check_ranges(ranges)
    of_groups = [_seen(group, _range_of(group, ranges)) for group in program.groups if _has_tokens(group)]
    some = [tokens for tokens in of_groups if len(tokens)]
    first, last = (tokens.first for tokens in some), (tokens.last for tokens in some)
    return TokenRange(min(first, default=0), max(last, default=0))


def _seen(group: GroupProgram, tokens: TokenRange) -> TokenRange:
    """The tokens from the first of which something moves in one group to the last one."""
    seen, each = group.state.seen_by_next(tokens), group.state.compress_ratio
    return TokenRange(seen.first * each, seen.last * each)


def _has_tokens(group: GroupProgram) -> bool:
    return bool(group.units or group.singles)


def _counted(program: Program, numbers: Sequence[range], is_last: bool) -> Iterator[tuple[Section, int]]:
    """Every section, with the number of places at which its rows begin; `numbers` are those of every group."""
    for group, at in zip(program.groups, numbers, strict=True):
        inner = len(_inner(group, at))
        yield from ((section, inner // group.unit_tokens) for section in group.units)
        yield from ((section, len(at) - inner) for section in group.singles)
        yield from ((section, int(is_last)) for section in group.fixed)


def _all_numbers(program: Program, ranges: Ranges, stretch: Stretch) -> list[range]:
    """The `_numbers` of every group. Raises BlockTableError when a range runs backwards or is missing."""
    check_ranges(ranges)
    return [_numbers(group, _range_of(group, ranges), stretch) for group in program.groups]


def check_ranges(ranges: Ranges) -> None:
    """Raises BlockTableError for a range that runs backwards or begins before the first token."""
    for tokens in ranges:
        if not 0 <= tokens.first <= tokens.last <= MAX_STOP:
            expected = f"0 <= first <= last <= {MAX_STOP}"
            raise BlockTableError("not a token range", found=f"[{tokens.first}, {tokens.last})", expected=expected)


def _range_of(group: GroupProgram, ranges: Ranges) -> TokenRange:
    if group.target_group >= len(ranges):
        expected = f"one per cache group of the target, group {group.target_group} included"
        raise BlockTableError("a token range is missing", found=f"{len(ranges)} ranges", expected=expected)
    return ranges[group.target_group]


def _numbers(group: GroupProgram, tokens: TokenRange, stretch: Stretch) -> range:
    """The numbers, within the group's selection, of the tokens that must move: those that later ones still see."""
    seen, part = group.state.seen_by_next(tokens), group.state.entries(stretch.tokens)
    first, last = max(seen.first, part.first), min(seen.last, part.last)
    start, stop = group.tokens.num_before(first), group.tokens.num_before(max(first, last))
    if last < seen.last or part.first >= seen.last:
        return range(start, stop)
    is_something = group.tokens.num_before(seen.first) < stop
    if is_something and group.target.tail_is_free and not (group.source.ring_tokens or group.target.ring_tokens):
        # A unit lies in one block on either side, so this asks for no further block. In a ring it would wrap around.
        # It may have begun in the stretch before, of which all tokens after this are other ranks'.
        stop = -(-stop // group.unit_tokens) * group.unit_tokens
    return range(start, stop)


def _inner(group: GroupProgram, numbers: range) -> range:
    """The part of the numbers that whole units cover."""
    unit = group.unit_tokens
    start = min(-(-numbers.start // unit) * unit, numbers.stop)
    return range(start, max(numbers.stop // unit * unit, start))


def _places(group: GroupProgram, numbers: range) -> tuple[Indices, Indices]:
    """The numbers of the tokens at which units begin, and those of the tokens that are moved one by one."""
    inner = _inner(group, numbers)
    edges = (
        np.arange(numbers.start, inner.start, dtype=np.int64),
        np.arange(inner.stop, numbers.stop, dtype=np.int64),
    )
    return np.arange(inner.start, inner.stop, group.unit_tokens, dtype=np.int64), np.concatenate(edges)


def _group_places(
    group: GroupProgram, source: Blocks, target: Blocks, numbers: list[range], has_fixed: bool
) -> Iterator[Places]:
    """The places of a group. `numbers` are those of each stretch; any states of fixed size belong to the last one."""
    units, singles = zip(*(_places(group, at) for at in numbers), strict=True)
    none = np.zeros(0, np.int64)
    fixed = (*[none] * (len(numbers) - 1), np.zeros(1, np.int64) if has_fixed else none)
    for sections, parts in ((group.units, units), (group.singles, singles), (group.fixed, fixed)):
        if sections and len(at := np.concatenate(parts)):
            tokens = group.tokens.token(at)
            stretch = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            yield Places(sections, source.at(tokens), target.at(tokens), stretch)


def _ends(group: GroupProgram, numbers: list[range], has_fixed: bool) -> Indices:
    """The first and the last token that moves; token 0 stands for states of fixed size."""
    if group.fixed:
        ends = [0] if has_fixed else []
    else:
        ends = [end for at in numbers if at and _has_tokens(group) for end in (at[0], at[-1])]
    return group.tokens.token(np.array(ends, np.int64))


def _tile(section: Section, places: Places) -> Tile:
    """A section at all its places. Places that follow one another on both sides, as adjacent blocks do, are one run:
    that does not depend on the row, so it is found once and not for every layer and head."""
    source, target = section.strides.source.shifts(places.source), section.strides.target.shifts(places.target)
    length = np.uint64(section.length)
    follows = (source[1:] - source[:-1] == length) & (target[1:] - target[:-1] == length)
    if not follows.any():
        return Tile(section.source, section.target, source, target, np.full(len(source), length))
    first = run_starts(follows)
    lengths = np.diff(first, append=len(source)).astype(np.uint64) * length
    return Tile(section.source, section.target, source[first], target[first], lengths)
