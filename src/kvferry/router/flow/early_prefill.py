"""A prefill leg that has promised a cache, and computes it beside the decode leg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.router.events import Event
from kvferry.router.flow.leg import Leg
from kvferry.router.telemetry.access_log import LEFT


class EarlyPrefill:
    """Reads a promised leg to its end and tells `ended` how that was, unless it is closed before."""

    def __init__(self, leg: Leg, ended: Callable[[Leg, Event], None]) -> None:
        self.leg = leg
        self._ended = ended
        self._is_left = False
        # It ends by itself when the connection does. Cancelling it would leave a cycle.
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        """Leave the stream: the promise is taken back, unless it is kept already."""
        self._is_left = True
        self.leg.close()
        self.leg.trace.ended(LEFT)

    async def until_ended(self, limit_s: float) -> None:
        """Wait for its end, but not for long."""
        await asyncio.wait({self._reading}, timeout=limit_s)

    async def _read(self) -> None:
        event = await self.leg.rest()
        if not self._is_left:
            self._ended(self.leg, event)
