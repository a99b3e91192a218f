"""Where the bytes of a digest lie in one rank: a subject, bound to the rank's layout and a request's blocks.

The bytes of a state are taken in an order that every layout agrees on: token by token, and within a token along the
state's axes as they are declared. States of fixed size go piece by piece of their leading axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import RequestError
from kvferry.plan.description.layout import Layout
from kvferry.plan.digests.bound_parts import BoundPart, Grid, Shape, StateGroup, bind_part
from kvferry.plan.digests.sampling import STRATUM_TOKENS, chosen
from kvferry.plan.digests.subject import DigestPolicy, Part, Subject
from kvferry.plan.programs.blocks import BlockTables, Owner, checked
from kvferry.plan.programs.copies import Column
from kvferry.plan.routing.selection import Indices

# The strata of a state of fixed size when it is sampled.
MAX_PIECES = 64
# At most so many bound parts are kept: peers make them up.
MAX_KNOWN = 256


@dataclass(frozen=True, slots=True, eq=False)
class Extract:
    """States whose items have the same `grid`. State `i` of them gives value `numbers[i]` of the digest.

    Its items begin at `starts[i] + shifts[i, :]`, absolute addresses; `shifts` has one row where all states have the
    same. All uint64.
    """

    numbers: tuple[int, ...]
    starts: Column
    shifts: NDArray[np.uint64]
    grid: Grid

    @property
    def items_per_state(self) -> int:
        return int(self.shifts.shape[1])

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all states together."""
        return len(self.numbers) * self.items_per_state * self.grid.num_bytes

    def addresses(self, states: slice, items: slice) -> NDArray[np.uint64]:
        """Where some items of some states begin: (states, items)."""
        shifts = self.shifts if len(self.shifts) == 1 else self.shifts[states]
        return np.add(self.starts[states, np.newaxis], shifts[:, items])


class Extractor:
    """Finds the bytes of digests in one rank. What does not depend on the request is worked out once."""

    def __init__(self, layout: Layout, side: str) -> None:
        """`side` is `source` or `target`, for messages."""
        self._layout = layout
        self._side = side
        self._known: dict[tuple[object, ...], BoundPart] = {}
        states = layout.state_named()
        # The bytes of one token, and those of all states of fixed size.
        self._token_bytes = self._fixed_bytes = 0
        for each in layout.placements:
            num_bytes = states[each.state].num_bytes(each.spans)
            if states[each.state].per_token:
                self._token_bytes += num_bytes
            else:
                self._fixed_bytes += num_bytes

    def extracts(self, subject: Subject, tables: BlockTables, num_tokens: int) -> tuple[Extract, ...]:
        """Where everything that a subject names lies, for a request that has `num_tokens` tokens.

        Raises RequestError (BlockTableError) for states, boxes, tokens or blocks that this rank or the request does not
        have, LayoutError for tokens that are shared out too differently.
        """
        parts = [self._part(part) for part in subject.parts]
        self._check_sizes(subject.parts, parts, num_tokens)
        found: list[Extract] = []
        number = 0
        for part, bound in zip(subject.parts, parts, strict=True):
            found += self._extracts(subject, part, bound, tables, number)
            number += len(part.states)
        return tuple(found)

    def _part(self, part: Part) -> BoundPart:
        key = part.states, part.box, part.tokens
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = bind_part(part, self._layout)
        return self._known[key]

    def _check_sizes(self, parts: Sequence[Part], bound: Sequence[BoundPart], num_tokens: int) -> None:
        """Raises RequestError for tokens that the request lacks, and for more bytes than it has: digests take time."""
        total = 0
        for part, one in zip(parts, bound, strict=True):
            count = len(one.numbers(part))
            if part.seen.last * one.compress_ratio > num_tokens or bool(count) != one.per_token:
                raise RequestError(
                    "the digest covers the wrong tokens",
                    found=f"[{part.seen.first}, {part.seen.last})",
                    expected=f"some of {num_tokens} tokens" if one.per_token else "none: the states are of fixed size",
                )
            total += max(1, count) * one.num_bytes
        most = self._token_bytes * num_tokens + self._fixed_bytes
        if total > most:
            raise RequestError(
                "the digest covers more than the cache holds", found=f"{total} bytes", expected=f"at most {most}"
            )

    def _extracts(
        self, subject: Subject, part: Part, bound: BoundPart, tables: BlockTables, number: int
    ) -> Iterator[Extract]:
        numbers = bound.numbers(part)
        ends = bound.selection.token(np.array([numbers[0], numbers[-1]] if numbers else [0], np.int64))
        for alike in bound.groups:
            picks = _picks(subject, part, alike, numbers)
            group = alike.shape.group
            blocks = checked(tables, Owner(self._side, group, self._layout.groups[group]), ends)
            tokens = bound.selection.token(picks) if bound.per_token else np.zeros((1, 1), np.int64)
            block, slot = blocks.at(tokens)
            shifts = block * alike.shape.block_stride + slot * alike.shape.token_stride
            if not bound.per_token:
                shifts = shifts + _piece_offsets(alike.shape, picks)
            places = tuple((alike.places + number).tolist())
            yield Extract(places, alike.starts, shifts.astype(np.uint64), alike.shape.grid)


def _picks(subject: Subject, part: Part, alike: StateGroup, numbers: range) -> Indices:
    """Which items of each state of a group to digest: (states, items), or (1, items) where all states have the same.

    Items are numbered among the tokens of a part, or among the pieces of a state of fixed size.
    """
    stratum = STRATUM_TOKENS
    if not numbers:
        numbers = range(prod(alike.shape.pieces[0]))
        stratum = -(-len(numbers) // MAX_PIECES)
    if subject.policy is DigestPolicy.FULL:
        return np.arange(numbers.start, numbers.stop, dtype=np.int64)[np.newaxis]
    return chosen(numbers, stratum, len(part.states), subject.seed)[alike.places]


def _piece_offsets(shape: Shape, picks: Indices) -> Indices:
    """Where pieces begin in the box of a state of fixed size."""
    offset = np.zeros_like(picks)
    for extent, stride in zip(reversed(shape.pieces[0]), reversed(shape.pieces[1]), strict=True):
        offset += picks % extent * stride
        picks = picks // extent
    return offset
