"""What happens to engines and between them, apart from single frames and tickets: each at a random time."""

from __future__ import annotations

from functools import partial

from simulator.context import RunContext
from simulator.engines.engine import Engine
from simulator.state.memory import Tables
from simulator.state.rank import Rank

INCIDENTS_S = 8.0
"""All incidents begin within this time."""

MAX_DOWN_S = 3.0
GONE = 0.2
MAX_CUT_S = 6.0
MAX_STOPPED_S = 8.0
MAX_FULL_S = 5.0


def plan_incidents(context: RunContext, sources: list[Engine], targets: list[Engine]) -> None:
    """Kills, partitions, stopped processes and full pools of a run."""
    scheduler, faults = context.scheduler, context.faults
    engines = [*sources, *targets]
    for _ in range(faults.num_kills):
        scheduler.at(scheduler.between(0.0, INCIDENTS_S), partial(_kill, context, scheduler.rng.choice(engines)))
    for _ in range(faults.num_partitions):
        pair = frozenset((scheduler.rng.choice(sources).name, scheduler.rng.choice(targets).name))
        scheduler.at(scheduler.between(0.0, INCIDENTS_S), partial(_cut, context, pair))
    for _ in range(faults.num_stalls):
        scheduler.at(scheduler.between(0.0, INCIDENTS_S), partial(_stop, context, scheduler.rng.choice(engines)))
    for _ in range(faults.num_full_pools):
        scheduler.at(scheduler.between(0.0, INCIDENTS_S), partial(_fill, context, scheduler.rng.choice(engines)))


def _kill(context: RunContext, engine: Engine) -> None:
    if engine.runs:
        context.log.fault("killed engine", engine.name)
        engine.kill()
        if context.scheduler.chance(GONE):
            context.log.note(engine.name, "never comes back")
            return
        context.scheduler.after(context.scheduler.between(0.0, MAX_DOWN_S), partial(_restart, context, engine))


def _restart(context: RunContext, engine: Engine) -> None:
    engine.start()
    context.log.note(
        engine.name, f"starts again as {engine.nodes[0].rank.party.engine_id}#{engine.nodes[0].rank.party.epoch}"
    )


def _cut(context: RunContext, pair: frozenset[str]) -> None:
    if pair not in context.cuts:
        context.log.fault("partition", " and ".join(sorted(pair)))
        context.cuts.add(pair)
        context.scheduler.after(context.scheduler.between(0.1, MAX_CUT_S), partial(_heal, context, pair))


def _heal(context: RunContext, pair: frozenset[str]) -> None:
    context.log.note(" and ".join(sorted(pair)), "reach one another again")
    context.cuts.discard(pair)


def _stop(context: RunContext, engine: Engine) -> None:
    """All ranks of an engine, or one."""
    nodes = engine.nodes if context.scheduler.chance(0.5) else engine.nodes[:1]
    for node in nodes:
        if node.rank.alive:
            duration_s = context.scheduler.between(0.1, MAX_STOPPED_S)
            context.log.fault("stopped process", node.rank.name, f"for {duration_s:.2f} s")
            node.rank.inbox.stop(duration_s)


def _fill(context: RunContext, engine: Engine) -> None:
    node = context.scheduler.rng.choice(engine.nodes)
    taken: list[Tables] = []
    for num_tokens in (8, 4, 2, 1):
        while found := node.rank.pool.take(num_tokens):
            taken += found
    context.log.fault("full pool", node.rank.name)
    context.scheduler.after(context.scheduler.between(0.1, MAX_FULL_S), partial(_empty, node.rank, taken))


def _empty(rank: Rank, taken: list[Tables]) -> None:
    for tables in taken:
        rank.free(tables)
