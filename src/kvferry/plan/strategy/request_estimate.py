"""What a request would cost between two engines: bytes, rows and a price for every pair of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import Ranges, copies_for
from kvferry.plan.routing.route import Leg, Route, route
from kvferry.plan.strategy.calibration import Costs
from kvferry.plan.strategy.cost_model import Choice, choose, counts_of


@dataclass(frozen=True, slots=True)
class PairQuote:
    """What moves from one source rank to one target rank, in which way, and why.

    `num_pieces` is the number of rows before neighbours are merged.
    """

    source_rank: int
    target_rank: int
    legs: tuple[Leg, ...]
    num_bytes: int
    num_pieces: int
    num_rows: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Quote:
    """All pairs of ranks between which something moves, and the route that they follow."""

    route: Route
    pairs: tuple[PairQuote, ...]

    @property
    def predicted_s(self) -> float:
        """Until the last rank is done: pairs go on at the same time, but a rank's own pairs share its link."""
        busy: defaultdict[tuple[str, int], float] = defaultdict(float)
        for pair in self.pairs:
            busy["source", pair.source_rank] += pair.choice.predicted_s
            busy["target", pair.target_rank] += pair.choice.predicted_s
        return max(busy.values(), default=0.0)


def quote(
    engines: tuple[Sequence[Layout], Sequence[Layout]],
    tables: tuple[BlockTables, BlockTables],
    ranges: Ranges,
    costs: Costs,
) -> Quote:
    """The quote of one request, in which each pair is priced as if it were alone.

    `engines` and `tables` are the source's and the target's; every rank of an engine has the same block tables, and
    `ranges` has one range per cache group of the target.

    Raises what `route` and `copies_for` raise.
    """
    sources, targets = engines
    found = route(sources, targets)
    pairs = []
    for source_rank, target_rank in found.pairs():
        legs, ranks = found.between(source_rank, target_rank), (sources[source_rank], targets[target_rank])
        program = bind(legs, *ranks)
        copies = copies_for(program, *tables, ranges)
        choice = choose(counts_of(copies, program.starts.source), costs)
        pairs.append(PairQuote(source_rank, target_rank, legs, copies.num_bytes, copies.pieces, len(copies), choice))
    return Quote(found, tuple(pairs))
