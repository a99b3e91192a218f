"""What happens to engines and between them, apart from single frames and tickets: each at a time by the dice."""

from __future__ import annotations

from functools import partial

from kvferry.testing.simulation.engine import Engine
from kvferry.testing.simulation.memory import Tables
from kvferry.testing.simulation.node import Node
from kvferry.testing.simulation.site import Site

TROUBLE_S = 8.0
"""All trouble begins within this time."""

MAX_DOWN_S = 3.0
GONE = 0.2
MAX_CUT_S = 6.0
MAX_STOPPED_S = 8.0
MAX_FULL_S = 5.0


def plan_trouble(site: Site, sources: list[Engine], targets: list[Engine]) -> None:
    """Kills, partitions, stopped processes and full pools of a run."""
    world, faults = site.world, site.faults
    engines = [*sources, *targets]
    for _ in range(faults.num_kills):
        world.at(world.between(0.0, TROUBLE_S), partial(_kill, site, world.dice.choice(engines)))
    for _ in range(faults.num_partitions):
        pair = frozenset((world.dice.choice(sources).name, world.dice.choice(targets).name))
        world.at(world.between(0.0, TROUBLE_S), partial(_cut, site, pair))
    for _ in range(faults.num_stalls):
        world.at(world.between(0.0, TROUBLE_S), partial(_stop, site, world.dice.choice(engines)))
    for _ in range(faults.num_full_pools):
        world.at(world.between(0.0, TROUBLE_S), partial(_fill, site, world.dice.choice(engines)))


def _kill(site: Site, engine: Engine) -> None:
    if engine.runs:
        site.story.fault("killed engine", engine.name)
        engine.kill()
        if site.world.chance(GONE):
            site.story.say(engine.name, "never comes back")
            return
        site.world.after(site.world.between(0.0, MAX_DOWN_S), partial(_restart, site, engine))


def _restart(site: Site, engine: Engine) -> None:
    engine.start()
    site.story.say(engine.name, f"starts again as {engine.nodes[0].party.engine_id}#{engine.nodes[0].epoch}")


def _cut(site: Site, pair: frozenset[str]) -> None:
    if pair not in site.cuts:
        site.story.fault("partition", " and ".join(sorted(pair)))
        site.cuts.add(pair)
        site.world.after(site.world.between(0.1, MAX_CUT_S), partial(_heal, site, pair))


def _heal(site: Site, pair: frozenset[str]) -> None:
    site.story.say(" and ".join(sorted(pair)), "reach one another again")
    site.cuts.discard(pair)


def _stop(site: Site, engine: Engine) -> None:
    """All ranks of an engine, or one."""
    nodes = engine.nodes if site.world.chance(0.5) else engine.nodes[:1]
    for node in nodes:
        if node.alive:
            duration_s = site.world.between(0.1, MAX_STOPPED_S)
            site.story.fault("stopped process", node.name, f"for {duration_s:.2f} s")
            node.inbox.stop(duration_s)


def _fill(site: Site, engine: Engine) -> None:
    node = site.world.dice.choice(engine.nodes)
    taken: list[Tables] = []
    for num_tokens in (8, 4, 2, 1):
        while found := node.pool.take(num_tokens):
            taken += found
    site.story.fault("full pool", node.name)
    site.world.after(site.world.between(0.1, MAX_FULL_S), partial(_empty, node, taken))


def _empty(node: Node, taken: list[Tables]) -> None:
    for tables in taken:
        node.free(tables)
