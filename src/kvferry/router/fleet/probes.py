"""The active probe: asks every instance's `/ready`, and `/health` where that is not 200, again and again.

Who an instance is, kvferry's engines say at `/kvferry/info`; of others `/v1/models` and `/version` tell a part of it,
and `/server_info` of SGLang's.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvferry.router.config import RouterConfig
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import InstanceState, ProbeResult
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.fleet.sglang_info import OWNER, sglang_info
from kvferry.router.policy.records import Instance
from kvferry.router.request.lenient_json import decoded
from kvferry.router.upstream.failures import CONNECT_TIMEOUT, DEADLINE, FAILURES, REFUSED, reason_of
from kvferry.router.upstream.http_client import HttpClient, HttpRequest

logger = logging.getLogger(__name__)

UNREADY = 503
EPOCH = b"x-kvferry-epoch"
# However often failed requests ask for a probe.
SHORTEST_PAUSE_S = 0.1
# Whoever does not answer in time may only be busy.
SLOW = frozenset((DEADLINE, CONNECT_TIMEOUT))
# An instance says who it is when it comes up, when it is another process than before, and every so many rounds.
ROUNDS_PER_INFO = 15
MAX_INFO_BYTES = 1 << 20


class Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class Models(msgspec.Struct):
    """Of another engine: the answer of `/v1/models`."""

    data: list[Model]


class Version(msgspec.Struct):
    """Of another engine: the answer of `/version`."""

    version: str = ""


class Prober:
    """Keeps a pool's health true. One task runs it for the life of the app."""

    def __init__(self, http: HttpClient, pool: InstancePool, config: RouterConfig) -> None:
        self._http = http
        self._pool = pool
        self._config = config
        self._round = 0

    async def run(self) -> None:
        """Probe for ever: at each interval, and at once when requests to an instance fail."""
        while True:
            try:
                async with asyncio.timeout(self._config.probe_interval_s):
                    await self._pool.probe_requested.wait()
            except TimeoutError:
                pass
            try:
                await self.probe_all()
            except Exception:
                # The top of a task: nobody would hear of its end, and no instance would be probed again.
                logger.exception("an internal error of the router ended a round of probes")
            await asyncio.sleep(SHORTEST_PAUSE_S)

    async def probe_all(self) -> None:
        """One round, all instances at the same time."""
        self._pool.probe_requested.clear()
        self._pool.expire()
        self._round += 1
        await asyncio.gather(*(self._probe(state) for state in self._pool.probed_states))

    async def _probe(self, state: InstanceState) -> None:
        instance = state.instance
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                ready, epoch = await self._ask(instance, "/ready")
                healthy = 200 if ready == 200 else (await self._ask(instance, "/health"))[0]
                is_new = not state.healthy or epoch not in ("", state.info.epoch)
                if healthy == 200 and (is_new or self._round % ROUNDS_PER_INFO == 0):
                    self._pool.introduce(instance, await self._ask_info(instance))
        except FAILURES as error:
            reason = reason_of(error, DEADLINE)
            result = ProbeResult.SILENT if reason in SLOW else ProbeResult.DOWN
            self._pool.probed(instance, result, f"its probe failed ({reason})")
            # Where nobody listens any more, its system has ended the connections that nobody holds; others may go on.
            if reason != REFUSED:
                self._pool.end_requests_if_down(instance)
            return
        if healthy != 200:
            self._pool.probed(instance, ProbeResult.DOWN, f"its probe was answered with {healthy}")
            self._pool.end_requests_if_down(instance)
        elif ready == UNREADY:
            words = "it is draining or its transfers fail: see its /ready"
            self._pool.probed(instance, ProbeResult.UNREADY, words)
        else:
            # Other engines have no /ready: they are ready when they are healthy.
            self._pool.probed(instance, ProbeResult.READY, "it is ready")

    async def _ask(self, instance: Instance, path: str) -> tuple[int, str]:
        """The status, and the epoch of the process that answers, if it tells."""
        response = await self._http.send(HttpRequest("GET", instance.url, path, [], b""))
        response.close()
        epochs = [value.decode("latin-1") for name, value in response.headers if name.lower() == EPOCH]
        return response.status, "".join(epochs)

    async def _ask_info(self, instance: Instance) -> EngineInfo:
        """Empty where it tells nothing that can be understood. Raises only FAILURES."""
        if told := await self._fetch(instance, "/kvferry/info"):
            return decoded(told, EngineInfo) or EngineInfo()
        models = decoded(await self._fetch(instance, "/v1/models"), Models) or Models([])
        owners, names = {model.owned_by for model in models.data}, tuple(model.id for model in models.data)
        if OWNER in owners:
            return sglang_info(await self._fetch(instance, "/server_info"), instance.role, names)
        version = decoded(await self._fetch(instance, "/version"), Version) or Version()
        return EngineInfo(" ".join(sorted(owners)), version.version, models=names)

    async def _fetch(self, instance: Instance, path: str) -> bytes:
        """Nothing of an answer but a 200 is read: an engine without this path may say so at any length."""
        response = await self._http.send(HttpRequest("GET", instance.url, path, [], b""))
        try:
            return await response.whole(MAX_INFO_BYTES) if response.status == 200 else b""
        finally:
            response.close()
