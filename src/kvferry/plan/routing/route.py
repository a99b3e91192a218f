"""Who sends which box to whom. Depends on shapes only: no address, no block, no byte stride.

Each target box is cut where source boxes end, and its tokens are divided by which sources have them. A cell that
several source ranks hold is read once, from one of them; the cells of one replica set are dealt out in equal
contiguous runs, so that the load differs by at most one box and a target rank keeps to as few sources as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from kvferry.errors import IncompatibleError, LayoutError, UncoveredError
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.description.span import Span, overlap, uncovered
from kvferry.plan.description.tokens import ALL_TOKENS, TokenSet, classes, num_lookups
from kvferry.plan.routing.compatibility import all_states, differences, moving

Box = tuple[Span, ...]

# What one route may cost in all: a lookup among token shares is 1, one among boxes and a leg are several. Peers decide
# how finely their boxes cut ours; this many steps are some seconds, and a thousand ranks need a fifth of them.
MAX_STEPS = 1 << 23
STEPS_PER_BOX = 4
STEPS_PER_LEG = 16


@dataclass(frozen=True, slots=True)
class Leg:
    """One box of one state, from one rank to another. `box` has one span per axis of the state.

    `tokens` are those that move: all, unless context parallelism shares them out on either side.
    """

    source_rank: int
    target_rank: int
    state: str
    box: Box
    tokens: TokenSet


@dataclass(frozen=True)
class Route:
    """All legs between two engines of `num_sources` and `num_targets` ranks, ordered by target rank and state."""

    legs: tuple[Leg, ...]
    num_sources: int
    num_targets: int

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], tuple[Leg, ...]]:
        found: dict[tuple[int, int], list[Leg]] = {}
        for leg in self.legs:
            found.setdefault((leg.source_rank, leg.target_rank), []).append(leg)
        return {pair: tuple(found[pair]) for pair in sorted(found)}

    @cached_property
    def _partners(self) -> tuple[tuple[int, int], ...]:
        read = {source for source, _ in self._by_pair}
        idle = (source for source in range(self.num_sources) if source not in read)
        told = ((source, index % self.num_targets) for index, source in enumerate(idle))
        return tuple(sorted([*self._by_pair, *told]))

    def between(self, source_rank: int, target_rank: int) -> tuple[Leg, ...]:
        """The legs of one pair of ranks; empty when nothing moves between them."""
        return self._by_pair.get((source_rank, target_rank), ())

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All (source rank, target rank) between which something moves, ascending."""
        return tuple(self._by_pair)

    def sources_of(self, target_rank: int) -> tuple[int, ...]:
        """The source ranks that a target rank reads or just tells that the request is done, ascending.

        A source rank that nobody reads, as its replicas do the work, keeps the request until it is told: one target
        rank does that.
        """
        return tuple(source for source, target in self._partners if target == target_rank)

    def targets_of(self, source_rank: int) -> tuple[int, ...]:
        """The target ranks that a source rank hears of, ascending: its lease waits for exactly these; at least one."""
        return tuple(target for source, target in self._partners if source == source_rank)


class _Held(NamedTuple):
    """What one source rank holds of a state."""

    rank: int
    box: Box
    tokens: TokenSet


class _Part(NamedTuple):
    """A part of a target box that no source box cuts further, its tokens, and the source ranks that hold all of it."""

    box: Box
    tokens: TokenSet
    ranks: tuple[int, ...]


class _Cell(NamedTuple):
    """A part that a target rank needs of a state."""

    target_rank: int
    state: State
    part: _Part


def route(sources: Sequence[Layout], targets: Sequence[Layout]) -> Route:
    """The legs that fill every box of every target rank exactly once, but for optional states that do not move.

    Raises IncompatibleError with all differences when the engines do not hold the same states, UncoveredError when a
    part of a state is held by no source rank.
    """
    if found := differences(sources, targets):
        raise IncompatibleError(found)
    moves = moving(sources, targets)
    held = {name: found for name, found in _held_by_state(sources).items() if name in moves}
    replica_sets: dict[tuple[int, ...], list[_Cell]] = {}
    for cell in _target_cells(held, targets):
        if not cell.part.ranks:
            raise _nobody_holds(cell, held[cell.state.name])
        replica_sets.setdefault(cell.part.ranks, []).append(cell)
    legs = [leg for ranks, cells in replica_sets.items() for leg in _deal(ranks, cells)]
    order = {state.name: index for index, state in enumerate(all_states(targets).values())}
    legs.sort(key=lambda leg: (leg.target_rank, order[leg.state], leg.box, leg.tokens.spans))
    return Route(tuple(legs), len(sources), len(targets))


def _tokens_of(layout: Layout, placement: Placement, state: State) -> TokenSet:
    return layout.groups[placement.group].share.tokens() if state.per_token else ALL_TOKENS


def _held_by_state(layouts: Sequence[Layout]) -> dict[str, list[_Held]]:
    held: dict[str, list[_Held]] = {}
    for rank, layout in enumerate(layouts):
        named = layout.state_named()
        for placement in layout.placements:
            tokens = _tokens_of(layout, placement, named[placement.state])
            held.setdefault(placement.state, []).append(_Held(rank, placement.spans, tokens))
    return held


def _target_cells(held: dict[str, list[_Held]], targets: Sequence[Layout]) -> Iterator[_Cell]:
    """Every cell of every target rank, of the states that are held."""
    # Layers are alike: what is found for the first is true for all that are held in the same way.
    alike: dict[tuple[_Held, ...], int] = {}
    kind = {name: alike.setdefault(tuple(found), len(alike)) for name, found in held.items()}
    known: dict[tuple[int, Box, TokenSet], list[_Part]] = {}
    budget = _Budget()
    for target_rank, layout in enumerate(targets):
        named = layout.state_named()
        for placement in (each for each in layout.placements if each.state in held):
            state = named[placement.state]
            tokens = _tokens_of(layout, placement, state)
            key = kind[state.name], placement.spans, tokens
            if key not in known:
                known[key] = list(_parts(placement.spans, tokens, held[state.name], budget))
            budget.spend(len(known[key]) * STEPS_PER_LEG)
            yield from (_Cell(target_rank, state, part) for part in known[key])


class _Budget:
    """Steps that are left. Raises LayoutError when there are none."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise LayoutError(
                "the two engines divide the cache in too many different places",
                found=f"more than {MAX_STEPS:,} steps",
                expected="fewer ranks, or more similar parallelism",
            )


def _parts(wanted: Box, tokens: TokenSet, held: list[_Held], budget: _Budget) -> Iterator[_Part]:
    """A target box and its tokens, divided by which ranks hold them."""
    per_axis = _cut(wanted, [one.box for one in held])
    budget.spend(prod(map(len, per_axis)) * len(held) * STEPS_PER_BOX)
    for box in product(*per_axis):
        holders = [one for one in held if contains(one.box, box)]
        shares = tuple(holder.tokens for holder in holders)
        found = classes(tokens, shares)
        if any(share != ALL_TOKENS for share in (tokens, *shares)):
            budget.spend(num_lookups(tokens, shares))
        for part, indices in found:
            yield _Part(box, part, tuple(holders[index].rank for index in indices))


def _cut(wanted: Box, held: list[Box]) -> list[list[Span]]:
    """The parts of each axis between all edges of the held boxes: no cell made of them crosses an edge, so a holder has
    all of it or none."""
    per_axis = []
    for axis, span in enumerate(wanted):
        parts = [part for box in held for part in overlap(span, box[axis])]
        edges = sorted({span.start, span.stop, *(e for part in parts for e in (part.start, part.stop))})
        per_axis.append([Span(start, stop) for start, stop in pairwise(edges)])
    return per_axis


def contains(outer: Box, inner: Box) -> bool:
    """Whether one box lies in another one with as many axes."""
    return all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, inner, strict=True))


def _deal(ranks: tuple[int, ...], cells: list[_Cell]) -> Iterator[Leg]:
    for index, cell in enumerate(cells):
        source_rank = ranks[index * len(ranks) // len(cells)]
        yield Leg(source_rank, cell.target_rank, cell.state.name, cell.part.box, cell.part.tokens)


def _nobody_holds(cell: _Cell, held: list[_Held]) -> UncoveredError:
    axes, (box, wanted, _) = cell.state.axes, cell.part
    gaps = [
        f"{axis.name} {gap}"
        for index, axis in enumerate(axes)
        for gap in uncovered(box[index], [part for one in held for part in overlap(box[index], one.box[index])])
    ]
    whole = [f"{axis.name} {span}" for axis, span in zip(axes, box, strict=True)]
    tokens = [] if wanted == ALL_TOKENS else [f"token: {wanted}"]
    return UncoveredError(
        f"no source rank holds a part of state {cell.state.name}",
        found=", ".join((gaps or whole) + tokens) or "all of it",
        expected="every part of the state on at least one source rank",
        hint="check that every rank of the source engine is listed",
    )
