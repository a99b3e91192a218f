"""One run: engines, requests and trouble, all from one seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from operator import attrgetter

from kvferry.errors import FerryError
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.testing.simulation.checks import Checks, Violation
from kvferry.testing.simulation.client import Client
from kvferry.testing.simulation.clock import World
from kvferry.testing.simulation.conversation import Conversation
from kvferry.testing.simulation.engine import Engine
from kvferry.testing.simulation.faults import Faults
from kvferry.testing.simulation.frames import FrameFabric
from kvferry.testing.simulation.node import Wiring
from kvferry.testing.simulation.plants import NO_PLANT, Plant
from kvferry.testing.simulation.shapes import NUM_SHAPES, shape_of
from kvferry.testing.simulation.site import Site
from kvferry.testing.simulation.staging_setup import StagingSetup
from kvferry.testing.simulation.story import Story
from kvferry.testing.simulation.tickets import TicketFabric
from kvferry.testing.simulation.trouble import TROUBLE_S, plan_trouble

END_S = 900.0
"""Long after the last deadline of the last request."""

DEFECTS = (Violation, FerryError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `violation` is empty when nothing was wrong. The counters are for the summary."""

    seed: int
    violation: str
    outcomes: Counter[str]
    injected: Counter[str]
    virtual_s: float
    story: tuple[str, ...] = ()


def simulate(seed: int, plant: Plant = NO_PLANT, told: bool = False) -> Outcome:
    """Play the run of a seed; the same seed gives the same run. With `told`, the outcome has its story."""
    world = World(seed)
    faults, digest = Faults.drawn(world.dice), world.dice.choice(list(DigestPolicy))
    story, shape = Story(world, told), shape_of(seed % NUM_SHAPES)
    staging = StagingSetup.drawn(world.dice, shape.request_bytes)
    has_names = world.chance(0.5)
    return _outcome(seed, Site(world, faults, shape, Checks(), story, plant, digest, staging, has_names))


def simulate_with(seed: int, faults: Faults, digest: DigestPolicy) -> Outcome:
    """Play a run with certain faults and a certain digest."""
    world = World(seed)
    shape, story = shape_of(seed % NUM_SHAPES), Story(world, told=False)
    staging = StagingSetup.drawn(world.dice, shape.request_bytes)
    return _outcome(seed, Site(world, faults, shape, Checks(), story, NO_PLANT, digest, staging))


def _outcome(seed: int, site: Site) -> Outcome:
    story, checks, violation = site.story, site.checks, ""
    story.say("run", f"seed {seed}:", site.shape.text, f"; digests {site.digest}")
    story.say("run", worded_faults(site.faults))
    try:
        _play(site)
    except DEFECTS as error:
        violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        story.say("run", "VIOLATION", violation)
    return Outcome(seed, violation, checks.outcomes, story.injected, site.world.now, tuple(story.lines))


def worded_faults(faults: Faults) -> str:
    """What may go wrong in a run."""
    named = {field.name: attrgetter(field.name)(faults) for field in fields(faults)}
    return ", ".join(f"{name} {value:.2g}" for name, value in named.items() if value)


def _play(site: Site) -> None:
    world = site.world
    wiring = Wiring(site, FrameFabric(site), TicketFabric(site))
    sources = [Engine(wiring, f"p{number}", site.shape.source) for number in range(world.dice.choice([1, 1, 2]))]
    targets = [Engine(wiring, f"d{number}", site.shape.target) for number in range(world.dice.choice([1, 1, 2]))]
    for engine in (*sources, *targets):
        engine.start()
    conversations = []
    for number in range(world.dice.randint(3, 8)):
        client = Client(site, f"client{number}", (*sources, *targets))
        conversation = Conversation(site, client, world.dice.choice(sources), *world.dice.choices(targets, k=2))
        conversations.append(conversation)
        world.at(world.between(0.0, TROUBLE_S), conversation.start)
    plan_trouble(site, sources, targets)
    if not world.run(END_S):
        raise Violation(f"something still goes on after {END_S:g} s")
    _check_end(site, conversations, [*sources, *targets])


def _check_end(site: Site, conversations: list[Conversation], engines: list[Engine]) -> None:
    for number, conversation in enumerate(conversations):
        if not conversation.outcome:
            raise Violation(f"client{number} was never told how its request ended")
        site.checks.outcomes[conversation.outcome] += 1
    for engine in engines:
        for node in engine.nodes:
            if node.alive:
                site.checks.quiet(node)
