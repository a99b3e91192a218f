"""The active probe: asks every instance's `/ready`, and `/health` where that is not 200, again and again.

kvferry's engines say who they are at `/kvferry/info`. For other engines `/v1/models` and `/version` tell a part of it,
and for SGLang's `/server_info`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass

import msgspec

from kvferry.errors import PeerError
from kvferry.router.config import RouterConfig
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceState, ProbeResult
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.probe_schedule import AT_ONCE, ProbeSchedule
from kvferry.router.fleet.sglang_info import OWNER, sglang_info
from kvferry.router.policy.records import Instance
from kvferry.router.request.lenient_json import decoded
from kvferry.router.upstream.failures import CONNECT_TIMEOUT, DEADLINE, EXHAUSTED, FAILURES, REFUSED, reason_of
from kvferry.router.upstream.http_client import HttpClient, HttpRequest

logger = logging.getLogger(__name__)

UNREADY = 503
EPOCH = b"x-kvferry-epoch"
# The shortest time between two probes of an instance, however often failed requests ask for one.
SHORTEST_PAUSE_S = 0.1
# What begins in one turn takes a few milliseconds of a core, so requests hardly wait for it. It is also a limit: 800 a
# second, so that of more than 1,600 instances each is asked less often than every two seconds.
PROBES_PER_TURN, TURN_S = 16, 0.02
# By which share of the interval the time to the next probe differs.
SPREAD = 0.1
# Whoever does not answer in time may only be busy.
SLOW = frozenset((DEADLINE, CONNECT_TIMEOUT))
# An instance says who it is when it comes up, when it is another process than before, and at every fifteenth probe.
PROBES_PER_INFO = 15
# Servers list each of thousands of adapters among their models.
MAX_INFO_BYTES = 8 << 20
# What servers say where a path leads nowhere, or is not for us.
ABSENT = dict.fromkeys((401, 403, 404, 405, 501), b"")


class Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class Models(msgspec.Struct):
    """The answer to `/v1/models` of an engine that is not kvferry's."""

    data: list[Model]


class Version(msgspec.Struct):
    """The answer to `/version` of an engine that is not kvferry's."""

    version: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a probe has found, in words as well; with `ends_requests` what waits for an instance that is down ends."""

    result: ProbeResult
    words: str
    ends_requests: bool = False


class Prober:
    """Keeps a pool's health true. One task runs it for the life of the app."""

    def __init__(self, http: HttpClient, pool: InstancePool, config: RouterConfig) -> None:
        self._http = http
        self._pool = pool
        self._config = config
        self._schedule = ProbeSchedule()
        self._under_way: dict[Instance, asyncio.Task[None]] = {}
        self._all_again_s = 0.0

    async def run(self) -> None:
        """Probe for ever: each instance at each interval, at once when it is new or requests to it fail, and soon when
        another one has been found down."""
        for state in self._pool.probed_states:
            self._schedule.put(state.instance, time.monotonic() + random.uniform(0, self._config.probe_interval_s))
        try:
            while True:
                await self._until_due()
                pause_s = TURN_S
                try:
                    self._begin_some()
                except Exception:
                    # The top of a task: nobody would hear of its end, and no instance would be probed again.
                    logger.exception("an internal error of the router ended a turn of probes")
                    pause_s = self._config.probe_interval_s
                await asyncio.sleep(pause_s)
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def probe_all(self) -> None:
        """Probe all instances at the same time, before anybody is served."""
        self._pool.probe_requests.take()
        self._pool.expire()
        await asyncio.gather(*(self._probe(state) for state in self._pool.probed_states))

    async def _until_due(self) -> None:
        # Whoever is asked now is due again after this at the earliest.
        soonest_s = self._config.probe_interval_s * (1 - SPREAD)
        try:
            async with asyncio.timeout(min(self._schedule.next_s - time.monotonic(), soonest_s)):
                await self._pool.probe_requests.are_there.wait()
        except TimeoutError:
            pass

    def _begin_some(self) -> None:
        """Begin as many of the due probes as hold up nobody. The others follow in the next turns."""
        self._pool.expire()
        now = time.monotonic()
        first, concern_all = self._pool.probe_requests.take()
        for instance in first:
            self._schedule.put(instance, AT_ONCE)
        if concern_all and now >= self._all_again_s:
            # At most one such round begins in an interval, however many more instances are found down in it.
            self._all_again_s = now + self._config.probe_interval_s
            for instance in self._pool.instances:
                self._schedule.put(instance, now)
        num_left = PROBES_PER_TURN
        while num_left and (due := self._schedule.take(now, num_left)):
            num_left -= sum(self._begin(instance, now) for instance in due)

    def _begin(self, instance: Instance, now: float) -> bool:
        """Probe an instance. Return whether that begins now: not if a probe is under way, or the instance has left."""
        state = self._pool.probed_state(instance)
        if instance in self._under_way:
            self._schedule.put(instance, now + SHORTEST_PAUSE_S)
        elif state is not None:
            self._under_way[instance] = asyncio.create_task(self._probe_and_pause(state))
            return True
        return False

    async def _probe_and_pause(self, state: InstanceState) -> None:
        try:
            await self._probe(state)
        except Exception:
            # As above, but for this instance alone.
            logger.exception("an internal error of the router ended a probe of %s", state.instance.url)
        await asyncio.sleep(SHORTEST_PAUSE_S)
        del self._under_way[state.instance]
        # Instances that came together are not to be probed together for ever.
        pause_s = self._config.probe_interval_s * random.uniform(1 - SPREAD, 1 + SPREAD)
        self._schedule.put(state.instance, time.monotonic() + pause_s)

    async def _probe(self, state: InstanceState) -> None:
        """Probe an instance, and tell the pool. If it has left meanwhile, another one may have come at its address, of
        which this tells nothing; it has a probe of its own."""
        found = await self._look_at(state)
        if found is None or not self._is_there(state):
            return
        self._pool.probed(state.instance, found.result, found.words)
        if found.ends_requests:
            self._pool.end_requests_if_down(state.instance)

    async def _look_at(self, state: InstanceState) -> _Found | None:
        """What an instance answers; None where this process cannot ask."""
        instance = state.instance
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                ready, epoch = await self._ask(instance, "/ready")
                healthy = 200 if ready == 200 else (await self._ask(instance, "/health"))[0]
                if healthy == 200:
                    await self._get_to_know(state, epoch)
        except FAILURES as error:
            reason = reason_of(error, DEADLINE)
            if reason == EXHAUSTED:
                logger.warning("no instance can be probed: %s", error)
                return None
            result = ProbeResult.SILENT if reason in SLOW else ProbeResult.DOWN
            # If nobody listens, the host has ended the connections of a dead process. Those of a live one may go on.
            return _Found(result, f"its probe failed ({reason})", ends_requests=reason != REFUSED)
        if healthy != 200:
            return _Found(ProbeResult.DOWN, f"its probe was answered with {healthy}", ends_requests=True)
        if ready == UNREADY:
            return _Found(ProbeResult.UNREADY, "it is draining or its transfers fail: see its /ready")
        # Other engines have no /ready: they are ready when they are healthy.
        return _Found(ProbeResult.READY, "it is ready")

    async def _ask(self, instance: Instance, path: str) -> tuple[int, str]:
        """The status, and the epoch of the process that answers, if it tells."""
        response = await self._http.send(HttpRequest("GET", instance.url, path, [], b""))
        response.close()
        epochs = [value.decode("latin-1") for name, value in response.headers if name.lower() == EPOCH]
        return response.status, "".join(epochs)

    def _is_there(self, state: InstanceState) -> bool:
        """Whether this instance has not left since its probe began."""
        return self._pool.probed_state(state.instance) is state

    async def _get_to_know(self, state: InstanceState, epoch: str) -> None:
        """Ask now and then who an instance is. A known one that cannot tell at the moment stays what it was, and is
        asked again at the next probe. Raises only FAILURES."""
        is_new = not state.healthy or epoch not in ("", state.info.epoch)
        state.num_probes += 1
        if not is_new and state.num_probes % PROBES_PER_INFO:
            return
        info, is_whole = await self._ask_info(state.instance)
        if not is_whole:
            state.num_probes = -1
        if self._is_there(state) and (is_new or is_whole):
            self._pool.introduce(state.instance, info)

    async def _ask_info(self, instance: Instance) -> tuple[EngineInfo, bool]:
        """What an engine says of itself, empty where nothing of it can be understood, and whether it has said all that
        it should. Raises only FAILURES."""
        told = await self._fetch(instance, "/kvferry/info")
        if told:
            return decoded(told, EngineInfo) or EngineInfo(), True
        listed = await self._fetch(instance, "/v1/models")
        models = decoded(listed or b"", Models) or Models([])
        owners, names = {model.owned_by for model in models.data}, tuple(model.id for model in models.data)
        if OWNER in owners:
            server = await self._fetch(instance, "/server_info")
            return sglang_info(server or b"", instance.role, names), None not in (told, listed, server)
        version = await self._fetch(instance, "/version")
        known = (decoded(version or b"", Version) or Version()).version
        return EngineInfo(" ".join(sorted(owners)), known, models=names), None not in (told, listed, version)

    async def _fetch(self, instance: Instance, path: str) -> bytes | None:
        """The body of a 200, nothing from an engine without this path, and None where that is not to be known. What
        says that it is not there may be of any length, and is not read."""
        response = await self._http.send(HttpRequest("GET", instance.url, path, [], b""))
        try:
            return await response.whole(MAX_INFO_BYTES) if response.status == 200 else ABSENT.get(response.status)
        except PeerError as error:
            logger.warning("%s%s cannot be understood: %s", instance.url, path, error)
            return None
        finally:
            response.close()
