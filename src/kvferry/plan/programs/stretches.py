"""A request's tokens cut into stretches, so that the first can be sent while others are still computed or staged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from kvferry.plan.description.span import MAX_STOP
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import GroupProgram, Program


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a request: the tokens in `tokens`. States of fixed size are as after the request's last token, so they
    belong to the stretch that `is_last`."""

    tokens: TokenRange
    is_last: bool


WHOLE = Stretch(TokenRange(0, MAX_STOP), is_last=True)
"""A request in one piece."""
ALL_OF_TOKENS = Stretch(TokenRange(0, MAX_STOP), is_last=False)
"""What a request has of every token: all but states of fixed size."""


def parted(token: int) -> tuple[Stretch, Stretch]:
    """What lies before a token, and all the rest."""
    return Stretch(TokenRange(0, token), is_last=False), Stretch(TokenRange(token, MAX_STOP), is_last=True)


def unit_tokens(program: Program) -> int:
    """How many tokens make a unit: whole units, one or several, need not be taken apart in any group."""
    return lcm(*(_unit_tokens(group) for group in program.groups))


def _unit_tokens(group: GroupProgram) -> int:
    """Where only some tokens of each period move, units are made of those; where several share an entry, of entries."""
    num_periods = group.unit_tokens // gcd(group.unit_tokens, len(group.tokens.first))
    return num_periods * group.tokens.period * group.state.compress_ratio


def stretch_tokens(program: Program, most_bytes: int) -> int:
    """How many tokens make about `most_bytes`: as many as fit, in units that need not be taken apart, but one unit at
    least. Both ranks find the same number. It counts every group in full, also those of which only a window moves."""
    unit = unit_tokens(program)
    num_bytes = sum(_num_bytes(group, unit) for group in program.groups)
    return max(1, most_bytes // max(1, num_bytes)) * unit


def even_stretches(ranges: Sequence[TokenRange], most_tokens: int, unit: int) -> tuple[Stretch, ...]:
    """The fewest stretches of at most `most_tokens`, all of about one length: with a short one at the end, the others
    would wait for each other longer than they have to. Cuts are multiples of `unit`, and so is `most_tokens`."""
    first, last = _ends(ranges)
    start = first // unit * unit
    num_stretches = max(1, -(-(last - start) // most_tokens))
    return _cut(start, last, max(1, -(-(last - start) // (num_stretches * unit))) * unit)


def stretches(ranges: Sequence[TokenRange], num_tokens: int) -> tuple[Stretch, ...]:
    """Stretches cut at multiples of `num_tokens`, from the first wanted token to the last; one if none is wanted."""
    first, last = _ends(ranges)
    return _cut(first // num_tokens * num_tokens, last, num_tokens)


def _cut(first: int, last: int, num_tokens: int) -> tuple[Stretch, ...]:
    starts = range(first, max(last, 1), num_tokens)
    found = [Stretch(TokenRange(start, start + num_tokens), start == starts[-1]) for start in starts]
    return tuple(found) or (WHOLE,)


def _ends(ranges: Sequence[TokenRange]) -> tuple[int, int]:
    """The first wanted token, and the one behind the last."""
    last = max((tokens.last for tokens in ranges), default=0)
    return min((tokens.first for tokens in ranges if len(tokens)), default=last), last


def _num_bytes(group: GroupProgram, num_tokens: int) -> int:
    """The bytes that a group has of so many tokens, which are whole units of it."""
    num_periods = num_tokens // group.state.compress_ratio // group.tokens.period
    num_units = num_periods * len(group.tokens.first) // group.unit_tokens
    return num_units * sum(section.length * len(section) for section in group.units)
