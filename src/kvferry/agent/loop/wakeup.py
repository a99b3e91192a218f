"""A bell that any thread may ring and one thread waits for together with its sockets."""

from __future__ import annotations

import os
import threading


class Wake:
    """An eventfd that nobody can write to after it was closed: its number may be somebody else's file by then."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """For a poller."""
        return self._fd

    def ring(self) -> None:
        """From any thread, at any time."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def rang(self) -> bool:
        """Whether it was rung since the last time."""
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
