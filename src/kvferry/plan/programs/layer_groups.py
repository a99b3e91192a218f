"""A program cut by states, so that what is computed of them can be sent while the others still are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.plan.description.layout import Layout
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.request import num_rows
from kvferry.plan.routing.route import Leg

# Bundles of so many sizes are tried: keys and values, with scales or without, are two to four states of a layer.
NUM_SIZES = 4
A_PROMPT = TokenRange(0, 4096)


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Moves some states of a program: those are computed once the first `num_states` of the source's layout are."""

    num_states: int
    program: Program


def bundles(legs: Sequence[Leg], source: Layout, target: Layout, num_bundles: int) -> tuple[Bundle, ...]:
    """What `bind` makes of the legs of one pair of ranks, in `num_bundles` of about as many states, or in fewer: where
    there are not so many, and where states that lie side by side, as keys and values may, would be more rows apart.
    States are taken in the order of the source's layout; each is in one bundle.

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
    """Of a prompt of some length."""
    return sum(num_rows(bundle.program, (A_PROMPT,) * len(target.groups)) for bundle in cut)
