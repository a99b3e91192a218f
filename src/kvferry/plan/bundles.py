"""A program cut by states, so that what is computed of them can be sent while the others still are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.plan.layout import Layout
from kvferry.plan.program import Program, bind
from kvferry.plan.route import Leg

__all__ = ["Bundle", "bundles"]


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Moves some states of a program: those are computed once the first `num_states` of the source's layout are."""

    num_states: int
    program: Program


def bundles(legs: Sequence[Leg], source: Layout, target: Layout, num_bundles: int) -> tuple[Bundle, ...]:
    """What `bind` makes of the legs of one pair of ranks, in `num_bundles` of about as many states, or in fewer where
    there are not so many. States are taken in the order of the source's layout; each is in one bundle.

    Raises what `bind` raises.
    """
    number_of = {state.name: number for number, state in enumerate(source.states, start=1)}
    by_state: dict[int, list[Leg]] = {}
    for leg in legs:
        by_state.setdefault(number_of[leg.state], []).append(leg)
    numbers = sorted(by_state)
    size = max(1, -(-len(numbers) // num_bundles))
    cuts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return tuple(
        Bundle(cut[-1], bind([leg for number in cut for leg in by_state[number]], source, target)) for cut in cuts
    )
