"""Waking up at a time that is not a whole millisecond: event loops round their timers up to those.

Requests of a Poisson process that are sent at whole milliseconds come in bursts, and queue behind each other in
whatever is measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from types import TracebackType

__all__ = ["Alarm"]

CLOCK_MONOTONIC, ABSOLUTE = 1, 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class Alarm:
    """A timerfd of Linux, in an event loop."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rang = asyncio.Event()

    def __enter__(self) -> Alarm:
        asyncio.get_running_loop().add_reader(self._fd, self._ring)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    async def until(self, at_s: float) -> None:
        """Wait until `time.monotonic()` is `at_s`; not at all when it is that already."""
        if at_s <= time.monotonic():
            return
        setting = _Setting(_Time(0, 0), _Time(int(at_s), int(at_s % 1 * 1e9)))
        self._rang.clear()
        if self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rang.wait()

    def _ring(self) -> None:
        os.read(self._fd, 8)
        self._rang.set()
