"""What the router knows of the fleet: its real pool of instances, with its real policy and breakers, on the virtual
clock, and probes as its prober makes them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

import simpy
from msgspec.structs import replace

from kvferry.router.config import PolicySettings, RouterConfig
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceRequest, InstanceState, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.probes import SHORTEST_PAUSE_S
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill
from kvferry.router.telemetry.metrics import Metrics
from kvferry.simulate.fleet.hardware import Hardware
from kvferry.simulate.fleet.work import EngineState
from kvferry.simulate.settings import Setting

Process = Generator[simpy.Event, Any, None]
# What a probe hears, and what it is called in the log.
HEARD = {
    EngineState.READY: (ProbeResult.READY, "it is ready"),
    EngineState.DRAINING: (ProbeResult.UNREADY, "it is draining"),
    EngineState.STOPPED: (ProbeResult.DOWN, "its probe failed (refused)"),
    EngineState.SILENT: (ProbeResult.SILENT, "its probe failed (deadline)"),
}


class Membership:
    """Belongs to one environment. `choice_s` is the time of a processor that the pool's choices have taken."""

    def __init__(self, env: simpy.Environment, setting: Setting, hardware: Hardware) -> None:
        urls = {role: tuple(e.instance.url for e in hardware.of_role(role)) for role in Role}
        self.config = RouterConfig(urls[Role.PREFILL], urls[Role.DECODE], prefill_fallback=setting.routing.fallback)
        settings = PolicySettings(setting.routing.policy, setting.routing.limits, lambda: float(env.now), seed=0)
        self.pool = InstancePool(self.config.instances, Metrics(), settings)
        self.choice_s, self.num_choices = 0.0, 0
        self._env, self._hardware = env, hardware
        self._waited_for: set[Instance] = set()
        self._probe(self.pool.probed_states)
        env.process(self._probing())

    def reserve(self, request: InstanceRequest) -> Reservation | SkipPrefill | Overloaded | NoInstance:
        """Have the pool choose, and time that."""
        began_s = time.process_time()
        found = self.pool.reserve(request)
        self.choice_s += time.process_time() - began_s
        self.num_choices += 1
        return found

    def _probing(self) -> Process:
        """Probe as `router.fleet.probes.Prober` does. All engines are probed at each interval, over which the router
        spreads them, one soon when a request to it has failed, and all when one is found down."""
        while True:
            due_s = self._env.now + self.config.probe_interval_s
            while self._env.now < due_s:
                yield self._env.timeout(SHORTEST_PAUSE_S)
                first, concern_all = self.pool.probe_requests.take()
                doubted = map(self.pool.probed_state, first)
                self._probe([state for state in doubted if state is not None])
                if concern_all:
                    break
            self._probe(self.pool.probed_states)

    def _probe(self, states: Iterable[InstanceState]) -> None:
        for state in states:
            if self._hardware.engines[state.instance].state is not EngineState.SILENT:
                self._hear(state)
            elif state.instance not in self._waited_for:
                self._env.process(self._wait_for(state))

    def _wait_for(self, state: InstanceState) -> Process:
        """Wait for the end of a probe that is not answered at once."""
        self._waited_for.add(state.instance)
        yield self._env.timeout(self.config.probe_timeout_s)
        self._waited_for.discard(state.instance)
        self._hear(state)
        self.pool.end_requests_if_down(state.instance)

    def _hear(self, state: InstanceState) -> None:
        engine = self._hardware.engines[state.instance]
        result, words = HEARD[engine.state]
        epoch = str(engine.epoch)
        if engine.serves and (not state.healthy or state.info.epoch != epoch):
            self.pool.introduce(state.instance, replace(INFO, epoch=epoch))
        self.pool.probed(state.instance, result, words)


INFO = EngineInfo(engine="kvferry", cache="simulated", wire_version="simulated", models=("simulated",))
