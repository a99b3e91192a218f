"""Wakes the agent's thread from any other one, while it waits for its sockets."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd. Nothing is written to it after `close`: its number may name another file by then."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Return the file descriptor for a poller to watch."""
        return self._fd

    def notify(self) -> None:
        """Wake the agent's thread. Any thread may call this at any time."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def consume(self) -> bool:
        """Whether `notify` was called since the last time."""
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the eventfd. Safe to call twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
