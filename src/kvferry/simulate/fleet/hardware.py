"""The engines of a fleet in their racks, the links between them, and what incidents do to both."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import simpy

from kvferry.router.policy.records import Instance, Role
from kvferry.simulate.fleet.engine import Engine
from kvferry.simulate.fleet.network import Network
from kvferry.simulate.fleet.work import EngineState, Work
from kvferry.simulate.incidents import Incident, RackDies, Rollout, SlowLink
from kvferry.simulate.settings import Setting

Process = Generator[simpy.Event, Any, None]


class Hardware:
    """Belongs to one environment. `ended` says when those incidents were over that have no end of their own."""

    def __init__(self, env: simpy.Environment, setting: Setting) -> None:
        self.engines = {engine.instance: engine for engine in _engines(env, setting)}
        self.racks: list[list[Engine]] = [[] for _ in range(setting.fleet.num_racks)]
        for engine in self.engines.values():
            self.racks[engine.rack].append(engine)
        wires = setting.wires
        rates = [wires.uplink_bytes_per_s or wires.link_bytes_per_s * len(rack) for rack in self.racks]
        self.network = Network(env, wires.cache, wires.link_bytes_per_s, rates)
        self.ended: dict[Incident, float] = {}
        self._env, self._times = env, setting.times
        # By rack, work of hosts that say nothing; by kind and rack, the incident that began last.
        self._lost: list[list[Work]] = [[] for _ in self.racks]
        self._latest: dict[tuple[type[Incident], int], Incident] = {}
        for incident in setting.incidents:
            env.process(self._happens(incident))

    def of_role(self, role: Role) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.instance.role is role]

    def _happens(self, incident: Incident) -> Process:
        yield self._env.timeout(incident.begins_s)
        match incident:
            case RackDies():
                yield from self._die(incident)
            case SlowLink():
                yield from self._slow(incident)
            case Rollout():
                yield from self._roll_out(incident)
                self.ended[incident] = self._env.now

    def _die(self, incident: RackDies) -> Process:
        engines, lost = self.racks[incident.rack], self._lost[incident.rack]
        for engine in engines:
            lost.extend(engine.stop(EngineState.SILENT))
        if (yield from self._ends(incident)):
            # Hosts that are back refuse connections until their engines have started.
            for engine in engines:
                engine.state = EngineState.STOPPED
            for work in lost:
                work.watcher.lost()
            lost.clear()
            yield from self._start(engines)

    def _slow(self, incident: SlowLink) -> Process:
        links = self.network.upwards[incident.rack], self.network.downwards[incident.rack]
        for link in links:
            link.set_share(incident.share)
        if (yield from self._ends(incident)):
            for link in links:
                link.set_share(1.0)

    def _ends(self, incident: RackDies | SlowLink) -> Generator[simpy.Event, Any, bool]:
        """Wait for the end. Return whether all is as before then: not where the next of its kind has begun there."""
        place = type(incident), incident.rack
        self._latest[place] = incident
        if math.isinf(incident.ends_s):
            return False
        yield self._env.timeout(incident.ends_s - incident.begins_s)
        return self._latest[place] is incident

    def _roll_out(self, incident: Rollout) -> Process:
        # Both roles side by side.
        waiting = sorted(self.engines.values(), key=lambda engine: engine.position)

        def replace() -> Process:
            while waiting:
                engine = waiting.pop(0)
                if engine.state is EngineState.READY:
                    yield from self._replace(engine)

        yield self._env.all_of([self._env.process(replace()) for _ in range(incident.at_once)])

    def _replace(self, engine: Engine) -> Process:
        """Drain it, end it, and start it anew, unless its host dies meanwhile."""
        engine.state = EngineState.DRAINING
        notice_s = min(self._times.notice_s, self._times.drain_s)
        yield self._env.timeout(notice_s)
        yield engine.idle() | self._env.timeout(self._times.drain_s - notice_s)
        if engine.state is not EngineState.DRAINING:
            return
        for work in engine.stop(EngineState.STOPPED):
            work.watcher.lost()
        yield from self._start([engine])

    def _start(self, engines: Sequence[Engine]) -> Process:
        """Start engines. One that is stopped again before it is ready is left to what has stopped it."""
        before = [engine.num_stops for engine in engines]
        yield self._env.timeout(self._times.start_up_s)
        for engine, num_stops in zip(engines, before, strict=True):
            if engine.num_stops == num_stops:
                engine.start()


def _engines(env: simpy.Environment, setting: Setting) -> list[Engine]:
    """Prefill engines first. Racks are filled with both roles side by side, so that each has its part of both."""
    found = []
    for role, number in ((Role.PREFILL, setting.fleet.num_prefill), (Role.DECODE, setting.fleet.num_decode)):
        for index in range(number):
            engine = Engine(env, Instance(f"http://{role}-{index}", role), setting.costs, setting.slow_s)
            engine.position = (index + 0.5) / number
            found.append(engine)
    for place, engine in enumerate(sorted(found, key=lambda engine: engine.position)):
        engine.rack = place // setting.fleet.per_rack
    return found
