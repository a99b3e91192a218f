"""Small fleets, in which times can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import simpy

from kvferry.bench.report.slo import Slo
from kvferry.plan.description.tokens import TokenRange
from kvferry.router.policy.records import Instance, RequestCost, Role
from kvferry.simulate.costs import CacheSize, EngineCosts
from kvferry.simulate.fleet.engine import Engine
from kvferry.simulate.fleet.network import Network
from kvferry.simulate.fleet.work import Watcher, Work
from kvferry.simulate.incidents import HotPrefix, incident_named, of_kind
from kvferry.simulate.load import Arrival, Load, arrivals_of
from kvferry.simulate.settings import Fleet, Setting, Times, Wires
from kvferry.simulate.simulation import simulate

TOKEN_S, STEP_S, SEQUENCE_S = 0.0001, 0.01, 0.0005
COSTS = EngineCosts(TOKEN_S, ((0, STEP_S), (1, STEP_S + SEQUENCE_S)), chunk_tokens=1000)
BYTES_PER_TOKEN, LINK = 100_000, 10e9
WIRES = Wires(CacheSize(BYTES_PER_TOKEN), LINK)
SLO = Slo(ttft_s=2.0, itl_s=0.05)


def setting(fleet=None, duration_s=100.0, incidents=(), **changes):
    named = tuple(incident_named(text) for text in incidents)
    given = Setting(fleet or Fleet(1, 1), COSTS, WIRES, SLO, duration_s, named, Times(start_up_s=10.0))
    return replace(given, **changes)


def arrival(at_s, prompt_tokens=800, output_tokens=10, prefixes=()):
    cost = RequestCost(prompt_tokens, output_tokens, prefixes, 256 if prefixes else 0)
    return Arrival(at_s, cost, prefixes)


def transfer_s(num_tokens):
    """The time of a transfer alone."""
    network = Network(simpy.Environment(), WIRES.cache, WIRES.link_bytes_per_s, (1e12,))
    tokens = TokenRange(0, num_tokens)
    return WIRES.cache.num_bytes(tokens) / WIRES.link_bytes_per_s + network.overhead_s(tokens)


def run(given, rate=0.0, lengths=((400, 1200), (10, 60)), seed=0):
    """A Poisson process of this rate."""
    from kvferry.bench.load.workload import Lengths

    load = Load(rate, given.duration_s, *(Lengths(*each) for each in lengths), seed)
    return simulate(given, arrivals_of(load.requests(), of_kind(given.incidents, HotPrefix), seed))


class Observed:
    """An engine alone, and when something was heard of the work that was given to it."""

    def __init__(self, costs=COSTS, slow_s=0.05):
        self.env = simpy.Environment()
        self.engine = Engine(self.env, Instance("http://engine", Role.DECODE), costs, slow_s)
        self.first, self.ended, self.lost, self.progress, self.works = {}, {}, [], {}, {}

    def begin(self, name, at_s, left=0, num_tokens=0, context_tokens=0):
        def noted(times):
            return lambda: times.__setitem__(name, self.env.now)

        watcher = Watcher(
            noted(self.first),
            noted(self.ended),
            lambda: self.lost.append(name),
            lambda number: self.progress.__setitem__(name, self.progress.get(name, 0) + number),
        )
        self.works[name] = Work(left, num_tokens, context_tokens, watcher)
        timeout = self.env.timeout(at_s)
        timeout.callbacks.append(lambda _: self.engine.begin(self.works[name]))
        return self
