"""The text of metrics, written once for all who ask for it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.router.telemetry.metrics import Metrics


class Scrapes:
    """Has metrics written. Belongs to the app's event loop. `prepare` sets those only known when somebody asks."""

    def __init__(self, metrics: Metrics, prepare: Callable[[], None]) -> None:
        self._metrics = metrics
        self._prepare = prepare
        self._writing: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """The text of the metrics. A caller that leaves before it is written does not stop it for the others."""
        if self._writing is None or self._writing.done():
            self._prepare()
            # For thousands of instances that takes tenths of a second, in which no request could go on.
            self._writing = asyncio.create_task(asyncio.to_thread(self._metrics.render))
        return await asyncio.shield(self._writing)
