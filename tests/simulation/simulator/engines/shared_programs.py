"""Sessions that take the programs which earlier runs between the same layouts have made."""

from __future__ import annotations

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.program import Program
from kvferry.session.source.session import SourceSession
from kvferry.session.source.targets import Targets
from kvferry.session.target.peers.bindings import Bindings, InboundRoute
from kvferry.session.target.session import TargetSession
from kvferry.wire.messages import TargetOffer
from simulator.state.programs import Layouts, programs_between


def share_programs(source: SourceSession, target: TargetSession, layouts: Layouts, rank: int) -> None:
    """Let the sessions of a rank find the programs of earlier runs between the same layouts."""
    source._targets = source._writes._targets = _SharedTargets(layouts, rank, source._timing)
    target._reads.bindings = _SharedBindings(layouts, rank)


class _SharedTargets(Targets):
    def _program(self, offer: TargetOffer) -> Program:
        _, programs = programs_between(self._layouts, offer.layouts, offer.party.rank)
        if self._rank not in programs:
            return super()._program(offer)
        return programs[self._rank]


class _SharedBindings(Bindings):
    def _planned(self, sources: list[Layout], names: tuple[str, ...]) -> tuple[InboundRoute, dict[int, Program]]:
        found, programs = programs_between(tuple(sources), self._layouts, self._rank)
        return self._inbound_route(found, programs), programs
