"""Leases on prefills that vLLM has ended before its device has: a speculator writes its layers after the token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.connectors.vllm.growing import Milestone
from kvferry.session.events import LeaseWanted

__all__ = ["LateLeases"]


class LateLeases:
    """`tell` hears of each lease when the device has done all that was begun before it was asked for, in order.

    Until then the blocks are nobody's to read, and vLLM keeps them: it has not heard of the lease's end.
    """

    def __init__(self, tell: Callable[[LeaseWanted], None], milestone: Milestone) -> None:
        self._tell = tell
        self._milestone = milestone
        self._begun: deque[tuple[Callable[[], bool], LeaseWanted]] = deque()

    def lease(self, wanted: LeaseWanted) -> None:
        """All of a prefill has been begun."""
        self._begun.append((self._milestone(), wanted))
        self.look()

    def look(self) -> None:
        """Tell what has been done since the last look."""
        while self._begun and self._begun[0][0]():
            self._tell(self._begun.popleft()[1])
