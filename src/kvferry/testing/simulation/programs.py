"""Programs that many runs share: binding two layouts is a pure function and takes longer than playing a run."""

from __future__ import annotations

from functools import lru_cache

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.routing.route import Route, route
from kvferry.plan.slots.partition import region_starts
from kvferry.session.events import PeerKey
from kvferry.session.source.session import SourceSession
from kvferry.session.source.targets import Targets
from kvferry.session.target.programs import Binding, Bindings
from kvferry.session.target.session import TargetSession
from kvferry.wire.messages import TargetOffer

Layouts = tuple[Layout, ...]


def remember_programs(source: SourceSession, target: TargetSession, layouts: Layouts, rank: int) -> None:
    """Let the sessions of a rank find the programs of earlier runs between the same layouts."""
    source._targets = source._carrying._targets = _RememberedTargets(layouts, rank, source._timing)
    target._reads.bindings = _RememberedBindings(layouts, rank)


class _RememberedTargets(Targets):
    def _program(self, offer: TargetOffer) -> Program:
        _, programs = programs_between(self._layouts, offer.layouts, offer.party.rank)
        if self._rank not in programs:
            return super()._program(offer)
        return programs[self._rank]


class _RememberedBindings(Bindings):
    def _bind(self, peers: tuple[PeerKey, ...], sources: list[Layout]) -> Binding:
        found, programs = programs_between(tuple(sources), self._layouts, self._rank)
        starts = {peers[source]: region_starts(sources[source], self._layouts[self._rank]) for source in programs}
        named = {peers[source]: program for source, program in programs.items()}
        return Binding(peers, found, named, dict(zip(peers, sources, strict=True)), starts)


@lru_cache(maxsize=4096)
def programs_between(sources: Layouts, targets: Layouts, rank: int) -> tuple[Route, dict[int, Program]]:
    """The route, and what each source rank that a target rank reads has for it."""
    found = route(sources, targets)
    programs = {
        source: bind(found.between(source, rank), sources[source], targets[rank]) for source in found.sources_of(rank)
    }
    return found, programs
