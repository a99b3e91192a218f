"""Where a request is cut that its source and its target move together: the source writes what lies before a token."""

from __future__ import annotations

from kvferry.plan.programs.program import Program
from kvferry.plan.programs.request import Ranges, seen, volume
from kvferry.plan.programs.token_chunks import ALL_OF_TOKENS, parted, unit_tokens


def token_at(program: Program, ranges: Ranges, share: float) -> int:
    """The token up to which about `share` of the bytes lie, where nothing has to be taken apart; 0 where there is none.

    States of fixed size belong to what lies behind it: where they are more than that, nothing is cut.

    Raises BlockTableError when a range runs backwards or is missing.
    """
    _, num_bytes = volume(program, ranges)
    _, of_tokens = volume(program, ranges, ALL_OF_TOKENS)
    if not of_tokens or share * num_bytes > of_tokens:
        return 0
    tokens, unit = seen(program, ranges), unit_tokens(program)
    token = round((tokens.first + share * num_bytes / of_tokens * len(tokens)) / unit) * unit
    _, before = volume(program, ranges, parted(token)[0])
    return token if 0 < before < num_bytes else 0
