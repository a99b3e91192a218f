"""Which tokens of which state a sampled digest looks at: few, spread evenly, and the same on both sides.

The tokens are cut into strata: the first, the last, and between them pieces of 16 that begin at multiples of 16. Every
state is looked at in a few strata, and states take turns, so that together they look into every stratum.

What that finds for certain, when it makes a difference to every byte: another request's cache; a wrong layer, state,
head or rank; a first or last token too many or too few; and any run of 16 tokens from a multiple of 16 on, hence any
whole block of at least as many, that is wrong in all states that share a block table. What it may miss: a single wrong
token; a wrong block of one layer alone; a flipped bit anywhere that was not looked at. The full digest finds those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.routing.selection import Indices

STRATUM_TOKENS = 16
# At least so many tokens, or pieces, of each state, however short the request.
MIN_CHOSEN = 4

_GOLDEN, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def chosen(numbers: range, stratum: int, num_states: int, seed: int) -> Indices:
    """The numbers to look at for each state: int64, (states, numbers per state).

    `numbers` must not be empty; `stratum` is how many lie in one stratum.
    """
    edges = _edges(numbers, stratum)
    num_strata = len(edges) - 1
    per_state = max(MIN_CHOSEN, -(-num_strata // num_states))
    # State after state takes the next stratum; a state's own are this far apart, so that all are taken in turn.
    step = -(-num_strata // per_state)
    which = np.add.outer(np.arange(num_states), np.arange(per_state) * step) % num_strata
    dice = _mixed(np.arange(which.size, dtype=np.uint64) + np.uint64(1), seed).reshape(which.shape)
    lengths = np.diff(edges)[which].astype(np.uint64)
    found: Indices = edges[:-1][which] + (dice % lengths).astype(np.int64)
    return found


def _edges(numbers: range, stratum: int) -> Indices:
    """Where strata begin, and the end of the last one."""
    first, last = numbers[0], numbers[-1]
    inner = np.arange(-(-first // stratum) * stratum, last, stratum, dtype=np.int64)
    edges: Indices = np.unique(np.concatenate(([first, first + 1], inner, [last, last + 1])))
    return edges


def _mixed(counts: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Numbers that look random: splitmix64. Not numpy's generators, which may change from release to release, while
    both sides must come to the same numbers."""
    mixed = np.uint64(seed) + counts * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))
