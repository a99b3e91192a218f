"""Requests to instances that nobody waits for."""

from __future__ import annotations

import asyncio
import logging

from kvferry.router.config import RouterConfig
from kvferry.router.upstream.connection_pool import Pool
from kvferry.router.upstream.exchange import FAILURES, Exchange, Outgoing

logger = logging.getLogger(__name__)


class Errands:
    """Belongs to the app's event loop. An errand that fails is only logged: its effect comes later anyway."""

    def __init__(self, pool: Pool, config: RouterConfig) -> None:
        self._pool = pool
        self._limit_s = config.probe_timeout_s
        self._open: set[asyncio.Task[None]] = set()

    def send(self, outgoing: Outgoing) -> None:
        """Begin; the answer is not looked at."""
        errand = asyncio.create_task(self._run(outgoing))
        self._open.add(errand)
        errand.add_done_callback(self._open.discard)

    async def aclose(self) -> None:
        """Wait for what is under way: each errand has a time limit of its own."""
        if self._open:
            await asyncio.wait(self._open)

    async def _run(self, outgoing: Outgoing) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                exchange = await Exchange.open(self._pool, outgoing)
                exchange.close()
        except FAILURES as error:
            logger.info("a background request to %s failed: %r", outgoing.base, error)
