"""One run: requests arrive at a fleet, and something looks at it again and again."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from kvferry.router.policy.records import Role
from kvferry.simulate.fleet.hardware import Hardware
from kvferry.simulate.fleet.network import Link
from kvferry.simulate.incidents import Incident
from kvferry.simulate.load import Arrival
from kvferry.simulate.outcome import Outcome
from kvferry.simulate.routing.conversation import Conversation
from kvferry.simulate.routing.membership import Membership
from kvferry.simulate.settings import Setting

Process = Generator[simpy.Event, Any, None]
NUM_SAMPLES = 120
GRACE_S = 600.0
"""So long after the last request has come, those that have not ended are left as they are."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet from the sample before until `at_s`: shares of the time in which engines of a role, and uplinks, were
    busy; shares of places for answers that were taken; who waits. Of uplinks the busiest one counts."""

    at_s: float
    busy_prefill: float
    busy_decode: float
    used_decode: float
    busy_uplink: float
    num_waiting_prefill: int
    num_waiting_decode: int
    num_answers: int


@dataclass(slots=True)
class Result:
    """What a run has found. `ended` says when incidents were over that have no end of their own. `busiest_link` and
    `busiest_uplink` are the shares of the time that counts in which the busiest ones carried something. `cpu_s` is a
    processor's time, of which `choice_s` were the router's choices."""

    setting: Setting
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ended: dict[Incident, float] = field(default_factory=dict)
    busiest_link: float = 0.0
    busiest_uplink: float = 0.0
    cpu_s: float = 0.0
    choice_s: float = 0.0
    num_choices: int = 0


def simulate(setting: Setting, arrivals: Sequence[Arrival]) -> Result:
    """Run the simulation. The same setting and arrivals have the same result. Only the time that it takes differs."""
    began_s, env = time.process_time(), simpy.Environment()
    hardware = Hardware(env, setting)
    membership = Membership(env, setting, hardware)
    result = Result(setting)
    looking = [env.process(_Sampler(env, hardware, result).run()), env.process(_links_used(env, hardware, result))]
    open_requests: list[simpy.Event] = []

    def arriving() -> Process:
        for arrival in arrivals:
            yield env.timeout(max(arrival.at_s - env.now, 0.0))
            outcome = Outcome(arrival.at_s, arrival.cost.prompt_tokens, arrival.output_tokens)
            result.outcomes.append(outcome)
            conversation = Conversation(env, setting, hardware, membership)
            open_requests.append(env.process(conversation.run(arrival, outcome)))
        rest = env.all_of([each for each in open_requests if not each.processed])
        yield rest | env.timeout(GRACE_S)
        # They end when the time is over: not before the last look at it.
        yield env.all_of(looking)

    env.run(env.process(arriving()))
    result.ended = hardware.ended
    result.choice_s, result.num_choices = membership.choice_s, membership.num_choices
    result.cpu_s = time.process_time() - began_s
    return result


def _until(env: simpy.Environment, at_s: float) -> simpy.Event:
    """The event that this time has come."""
    return env.timeout(max(at_s - env.now, 0.0))


def _links_used(env: simpy.Environment, hardware: Hardware, result: Result) -> Process:
    """Look at the links when the time that counts begins, and when it ends."""
    network, begins_s, ends_s = hardware.network, result.setting.times.warm_up_s, result.setting.duration_s
    yield _until(env, begins_s)
    before_s = {link: link.busy_s for link in (*network.links, *network.uplinks)}
    yield _until(env, ends_s)

    def busiest(links: Sequence[Link]) -> float:
        shares = [(link.busy_s - before_s.get(link, 0.0)) / (ends_s - begins_s) for link in links]
        return max(shares, default=0.0)

    result.busiest_link, result.busiest_uplink = busiest(network.links), busiest(network.uplinks)


class _Sampler:
    """Looks at the fleet at equal times."""

    def __init__(self, env: simpy.Environment, hardware: Hardware, result: Result) -> None:
        self._env, self._hardware, self._samples = env, hardware, result.samples
        self._duration_s = result.setting.duration_s
        self._before: dict[object, float] = {}

    def run(self) -> Process:
        for number in range(1, NUM_SAMPLES + 1):
            # No sum of pauses, which would not end when the run does.
            at_s = self._duration_s * number / NUM_SAMPLES
            yield _until(self._env, at_s)
            self._samples.append(self._sample(at_s))

    def _sample(self, at_s: float) -> Sample:
        hardware, network = self._hardware, self._hardware.network
        prefill, decode = hardware.of_role(Role.PREFILL), hardware.of_role(Role.DECODE)
        return Sample(
            at_s=at_s,
            busy_prefill=_mean([self._busy(engine) for engine in prefill]),
            busy_decode=_mean([self._busy(engine) for engine in decode]),
            used_decode=_mean([engine.used_share for engine in decode]),
            busy_uplink=max([self._busy(link) for link in network.uplinks]),
            num_waiting_prefill=sum(engine.num_waiting for engine in prefill),
            num_waiting_decode=sum(engine.num_waiting for engine in decode),
            num_answers=sum(engine.num_answers for engine in decode),
        )

    def _busy(self, thing: Any) -> float:
        """Which part of the time since the sample before it was busy."""
        busy_s = thing.busy_s
        before_s, self._before[thing] = self._before.get(thing, 0.0), busy_s
        return float((busy_s - before_s) * NUM_SAMPLES / self._duration_s)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
