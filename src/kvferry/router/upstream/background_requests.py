"""Requests to instances that nobody waits for."""

from __future__ import annotations

import asyncio
import logging

from kvferry.router.config import RouterConfig
from kvferry.router.upstream.failures import FAILURES
from kvferry.router.upstream.http_client import HttpClient, UpstreamRequest

logger = logging.getLogger(__name__)


class BackgroundRequests:
    """Belongs to the app's event loop. A request that fails is only logged: its effect comes later anyway."""

    def __init__(self, http: HttpClient, config: RouterConfig) -> None:
        self._http = http
        self._limit_s = config.probe_timeout_s
        self._open: set[asyncio.Task[None]] = set()

    def send(self, request: UpstreamRequest) -> None:
        """Begin; the answer is not looked at."""
        task = asyncio.create_task(self._run(request))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def aclose(self) -> None:
        """Wait for what is under way: each has a time limit of its own."""
        if self._open:
            await asyncio.wait(self._open)

    async def _run(self, request: UpstreamRequest) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                response = await self._http.send(request)
                response.close()
        except FAILURES as error:
            logger.info("a background request to %s failed: %r", request.base, error)
