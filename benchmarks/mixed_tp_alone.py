"""One of our transports by itself: no agents, no plan, one row that is read from each source."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping

from kvferry.plan.programs.copies import Copies, Direction
from kvferry.transport.base import Memory
from kvferry.transport.registry import open_transports

__all__ = ["Alone"]

COPY_S = 60.0


class Alone:
    """A transport that can read a peer without the peer's help: `shm` or `cma`."""

    def __init__(self, name: str, memory: Memory) -> None:
        (self._transport,) = open_transports(name).transports
        self._transport.register(memory)

    def descriptor(self) -> str:
        return base64.b64encode(self._transport.descriptor()).decode()

    def meet(self, peer: str, descriptor: str) -> None:
        self._transport.connect(peer, base64.b64decode(descriptor))

    def read(self, wanted: Mapping[str, Copies]) -> float:
        """What each peer is to be read for, posted at once; seconds."""
        began = time.perf_counter()
        waiting = {self._transport.post(peer, copies, Direction.READ) for peer, copies in wanted.items()}
        while waiting:
            ended = self._transport.poll()
            errors = [each.error for each in ended if each.error]
            if errors or time.perf_counter() > began + COPY_S:
                raise RuntimeError(f"a plain copy failed: {errors or 'no end'}")
            waiting -= {each.ticket for each in ended}
        return time.perf_counter() - began

    def close(self) -> None:
        self._transport.close()
