"""SIGINT and SIGTERM, for a main thread that waits for them."""

from __future__ import annotations

import queue
import signal
from contextlib import suppress


class StopSignal:
    """SIGINT or SIGTERM, from `listen` on.

    Not a `threading.Event`: its lock is held for moments by the thread that waits, which is the one that runs signal
    handlers. A handler that came in such a moment would wait for its own thread, for ever. This queue has no such lock.
    """

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_come = False

    def listen(self) -> None:
        """Only in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._told.put(None))

    def wait(self, timeout_s: float) -> bool:
        """Whether it has come, at the latest after so long."""
        if not self._has_come:
            with suppress(queue.Empty):
                self._told.get(timeout=timeout_s)
                self._has_come = True
        return self._has_come
