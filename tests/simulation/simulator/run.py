"""One run: engines, requests and incidents, all from one seed."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from kvferry.errors import FerryError
from kvferry.plan.digests.subject import DigestPolicy
from simulator.context import RunContext
from simulator.defects.defect import NO_DEFECT, Defect
from simulator.engines.engine import Engine
from simulator.engines.node import Networks
from simulator.faults import Faults
from simulator.network.frames import ControlNetwork
from simulator.network.tickets import TransferNetwork
from simulator.report.event_log import EventLog
from simulator.report.outcome import Outcome
from simulator.scenario.client import Client
from simulator.scenario.conversation import Conversation
from simulator.scenario.incidents import INCIDENTS_S, plan_incidents
from simulator.scheduler import Scheduler
from simulator.state.shapes import NUM_SHAPES, shape_of
from simulator.state.staging_setup import StagingSetup
from simulator.violation import Violation

END_S = 900.0
"""Long after the last deadline of the last request."""

DEFECT_ERRORS = (
    Violation,
    FerryError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


def simulate(seed: int, defect: Defect = NO_DEFECT, is_logged: bool = False) -> Outcome:
    """Play the run of a seed; the same seed gives the same run. With `is_logged`, the outcome has its log."""
    scheduler = Scheduler(seed)
    faults, digest = Faults.drawn(scheduler.rng), scheduler.rng.choice(list(DigestPolicy))
    log, shape = EventLog(scheduler, is_logged), shape_of(seed % NUM_SHAPES)
    staging = StagingSetup.drawn(scheduler.rng, shape.request_bytes)
    has_names = scheduler.chance(0.5)
    is_revocable = seed % 4 == 3
    return _outcome(seed, RunContext(scheduler, faults, shape, log, defect, digest, staging, has_names, is_revocable))


def simulate_with(seed: int, faults: Faults, digest: DigestPolicy) -> Outcome:
    """Play a run with certain faults and a certain digest."""
    scheduler = Scheduler(seed)
    shape, log = shape_of(seed % NUM_SHAPES), EventLog(scheduler, is_logged=False)
    staging = StagingSetup.drawn(scheduler.rng, shape.request_bytes)
    return _outcome(seed, RunContext(scheduler, faults, shape, log, NO_DEFECT, digest, staging))


def _outcome(seed: int, context: RunContext) -> Outcome:
    log, checks, violation = context.log, context.checks, ""
    log.note("run", f"seed {seed}:", context.shape.text, f"; digests {context.digest}")
    log.note("run", worded_faults(context.faults))
    try:
        _play(context)
    except DEFECT_ERRORS as error:
        violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        log.note("run", "VIOLATION", violation)
    return Outcome(seed, violation, checks.outcomes, log.injected, context.scheduler.now, tuple(log.lines))


def worded_faults(faults: Faults) -> str:
    """What may go wrong in a run."""
    named = {field.name: attrgetter(field.name)(faults) for field in fields(faults)}
    return ", ".join(f"{name} {value:.2g}" for name, value in named.items() if value)


def _play(context: RunContext) -> None:
    scheduler = context.scheduler
    networks = Networks(context, ControlNetwork(context), TransferNetwork(context))
    sources = [
        Engine(networks, f"p{number}", context.shape.source) for number in range(scheduler.rng.choice([1, 1, 2]))
    ]
    targets = [
        Engine(networks, f"d{number}", context.shape.target) for number in range(scheduler.rng.choice([1, 1, 2]))
    ]
    for engine in (*sources, *targets):
        engine.start()
    conversations = []
    for number in range(scheduler.rng.randint(3, 8)):
        client = Client(context, f"client{number}", (*sources, *targets))
        conversation = Conversation(
            context, client, scheduler.rng.choice(sources), *scheduler.rng.choices(targets, k=2)
        )
        conversations.append(conversation)
        scheduler.at(scheduler.between(0.0, INCIDENTS_S), conversation.start)
    plan_incidents(context, sources, targets)
    if not scheduler.run(END_S):
        raise Violation(f"something still goes on after {END_S:g} s")
    _check_end(context, conversations, [*sources, *targets])


def _check_end(context: RunContext, conversations: list[Conversation], engines: list[Engine]) -> None:
    for number, conversation in enumerate(conversations):
        if not conversation.outcome:
            raise Violation(f"client{number} was never told how its request ended")
        context.checks.outcomes[conversation.outcome] += 1
    for engine in engines:
        for node in engine.nodes:
            if node.rank.alive:
                context.checks.quiet(node.rank, node.left())
