"""A program cut in two ways: into bundles of states, each sent while the source computes the next; and at a token, up
to which the source writes while the target reads the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.plan.description.layout import Layout
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.request import Ranges, seen, volume
from kvferry.plan.programs.stretches import ALL_OF_TOKENS, parted, unit_tokens
from kvferry.plan.routing.route import Leg

# Bundles of so many sizes are tried: keys and values, with scales or without, are two to four states of a layer.
NUM_SIZES = 4
A_PROMPT = TokenRange(0, 4096)


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Moves some states of a program. They are computed once the first `num_states` of the source's layout are."""

    num_states: int
    program: Program


def bundles(legs: Sequence[Leg], source: Layout, target: Layout, num_bundles: int) -> tuple[Bundle, ...]:
    """The legs of one pair of ranks, bound in `num_bundles` bundles of about as many states each. There are fewer
    bundles where there are fewer states, and where states that lie side by side, as keys and values may, are fewer rows
    together. States are taken in the order of the source's layout; each is in one bundle.

    Raises what `bind` raises.
    """
    number_of = {state.name: number for number, state in enumerate(source.states, start=1)}
    by_state: dict[int, list[Leg]] = {}
    for leg in legs:
        by_state.setdefault(number_of[leg.state], []).append(leg)
    least = max(1, -(-len(by_state) // num_bundles))
    found = [_cut(by_state, size, source, target) for size in range(least, least + NUM_SIZES)]
    return min(found, key=lambda cut: _num_rows(cut, target))


def _cut(by_state: Mapping[int, Sequence[Leg]], size: int, source: Layout, target: Layout) -> tuple[Bundle, ...]:
    """Bundles of `size` states each; the last may have fewer."""
    numbers = sorted(by_state)
    cuts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return tuple(
        Bundle(cut[-1], bind([leg for number in cut for leg in by_state[number]], source, target)) for cut in cuts
    )


def _num_rows(cut: Sequence[Bundle], target: Layout) -> int:
    """The number of rows that the bundles have for `A_PROMPT`."""
    return sum(volume(bundle.program, (A_PROMPT,) * len(target.groups))[0] for bundle in cut)


def token_at(program: Program, ranges: Ranges, share: float) -> int:
    """The token up to which about `share` of the bytes lie, where nothing has to be taken apart; 0 where there is none.

    States of fixed size belong to what lies behind it: where they are more than that part may have, the result is 0.

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
