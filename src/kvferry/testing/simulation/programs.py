"""Programs that many runs share: binding two layouts is a pure function and takes longer than playing a run."""

from __future__ import annotations

from functools import lru_cache

from kvferry.plan.layout import Layout
from kvferry.plan.program import Program, bind
from kvferry.plan.route import Route, route
from kvferry.session.events import PeerKey
from kvferry.session.programs import Binding, Bindings
from kvferry.session.target import TargetSession

__all__ = ["remember_programs"]

Layouts = tuple[Layout, ...]


def remember_programs(session: TargetSession, layouts: Layouts, rank: int) -> None:
    """Let a session find the programs of earlier runs between the same layouts."""
    session._bindings = _RememberedBindings(layouts, rank)


class _RememberedBindings(Bindings):
    def _bind(self, peers: tuple[PeerKey, ...], sources: list[Layout]) -> Binding:
        found, programs = _bound(tuple(sources), self._layouts, self._rank)
        return Binding(peers, found, {peers[source]: program for source, program in programs.items()})


@lru_cache(maxsize=4096)
def _bound(sources: Layouts, targets: Layouts, rank: int) -> tuple[Route, dict[int, Program]]:
    found = route(sources, targets)
    programs = {
        source: bind(found.between(source, rank), sources[source], targets[rank]) for source in found.sources_of(rank)
    }
    return found, programs
