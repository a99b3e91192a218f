"""Programs that many runs share: binding two layouts is a pure function and takes longer than playing a run."""

from __future__ import annotations

from functools import lru_cache

from kvferry.plan.description.layout import Layout
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.routing.route import Route, route

Layouts = tuple[Layout, ...]


@lru_cache(maxsize=4096)
def programs_between(sources: Layouts, targets: Layouts, rank: int) -> tuple[Route, dict[int, Program]]:
    """The route, and what each source rank that a target rank reads has for it."""
    found = route(sources, targets)
    programs = {
        source: bind(found.between(source, rank), sources[source], targets[rank]) for source in found.sources_of(rank)
    }
    return found, programs
