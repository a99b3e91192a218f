"""A prefill request that goes on beside the decode request: it has promised a cache, or both meet in a room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvferry.router.events import NOT_WANTED, Event
from kvferry.router.flow.upstream_request import UpstreamRequest
from kvferry.router.telemetry.access_log import LEFT

# How long an answer of D waits for an early prefill to tell what it had cached. Its prompt is computed, so its end is
# near.
LAST_USAGE_S = 1.0


class EarlyPrefill:
    """Waits for the request's `end` and tells `ended` how that was, unless it is closed before."""

    def __init__(
        self,
        request: UpstreamRequest,
        end: Callable[[], Awaitable[Event]],
        ended: Callable[[UpstreamRequest, Event], None],
    ) -> None:
        self.request = request
        self._end = end
        self._ended = ended
        self._is_left = False
        # It ends by itself when the connection does. Cancelling it would leave a cycle.
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        """Leave it: what it computes is not kept, unless it has been read already."""
        self._is_left = True
        self.request.give_up(NOT_WANTED)
        self.request.close()
        self.request.trace.ended(LEFT)

    async def until_ended(self, limit_s: float) -> None:
        """Wait for its end, but not for long."""
        await asyncio.wait({self._reading}, timeout=limit_s)

    async def _read(self) -> None:
        event = await self._end()
        if not self._is_left:
            self._ended(self.request, event)


@dataclass(slots=True)
class PrefillUsage:
    """What the prefill engine had cached of the prompt: `cached_tokens`, None as long as it has not told. While an
    `early` prefill is under way, it still may."""

    cached_tokens: int | None = None
    early: EarlyPrefill | None = None

    @property
    def may_come(self) -> bool:
        return self.cached_tokens is None and self.early is not None

    async def wait(self) -> None:
        if self.cached_tokens is None and self.early is not None:
            await self.early.until_ended(LAST_USAGE_S)
