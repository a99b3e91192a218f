"""A prefill leg that has promised a cache, and computes it beside the decode leg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.router.events import Event
from kvferry.router.leg import Leg

__all__ = ["EarlyPrefill"]


class EarlyPrefill:
    """Reads a promised leg to its end and tells `ended` how that was, unless it is closed before."""

    def __init__(self, leg: Leg, ended: Callable[[Leg, Event], None]) -> None:
        self._leg = leg
        self._ended = ended
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        """Leave the stream: the promise is taken back, unless it is kept already."""
        self._reading.cancel()
        self._leg.close()

    async def _read(self) -> None:
        self._ended(self._leg, await self._leg.rest())
