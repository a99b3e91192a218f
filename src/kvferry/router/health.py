"""The active probe: asks every instance's `/ready`, and `/health` where that is not 200, again and again."""

from __future__ import annotations

import asyncio

import aiohttp

from kvferry.router.config import RouterConfig
from kvferry.router.membership import Membership
from kvferry.router.policy import Instance
from kvferry.router.upstream import DEADLINE, FAILURES, Exchange, Outgoing, reason_of

__all__ = ["Prober"]

UNREADY = 503


class Prober:
    """Keeps a membership's health true. One task runs it for the life of the app."""

    def __init__(self, session: aiohttp.ClientSession, membership: Membership, config: RouterConfig) -> None:
        self._session = session
        self._membership = membership
        self._config = config

    async def run(self) -> None:
        """Probe for ever: at each interval, and at once when traffic doubts an instance."""
        while True:
            try:
                async with asyncio.timeout(self._config.probe_interval_s):
                    await self._membership.doubted.wait()
            except TimeoutError:
                pass
            await self.probe_all()

    async def probe_all(self) -> None:
        """One round, all instances at the same time."""
        self._membership.doubted.clear()
        await asyncio.gather(*(self._probe(instance) for instance in self._membership.instances))

    async def _probe(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                ready = await self._ask(instance, "/ready")
                healthy = 200 if ready == 200 else await self._ask(instance, "/health")
        except FAILURES as error:
            self._membership.mark_down(instance, f"its probe failed ({reason_of(error, DEADLINE)})")
            return
        if healthy != 200:
            self._membership.mark_down(instance, f"its probe was answered with {healthy}")
        elif ready == UNREADY:
            self._membership.mark_unready(instance, "it drains, or its transfers fail: ask its /ready")
        else:
            # Other engines have no /ready: they are ready when they are healthy.
            self._membership.mark_up(instance)

    async def _ask(self, instance: Instance, path: str) -> int:
        exchange = await Exchange.open(self._session, Outgoing("GET", instance.url + path, [], b""))
        exchange.close()
        return exchange.status
