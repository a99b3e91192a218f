"""Scheduler time slices: how long a thread that wakes up may wait behind one that copies.

A message goes through threads of ZeroMQ's at both ends. Each works for microseconds, but where all cores copy it waits
for one of them, up to a whole time slice of the running thread, while the peer is idle. Since 6.12 Linux lets a thread
that wakes up interrupt one of a longer slice, and every thread may choose its own: its share of the processor stays.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

SLICE_NS = 100_000
"""The shortest that Linux grants."""

# Python has no functions for these system calls, and the C library only since 2.41.
_CALLS = {
    "x86_64": {"sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"sched_setattr": 274, "sched_getattr": 275},
}
# Under other policies `runtime_ns` means something else, or nothing.
_SLICED_POLICIES = (os.SCHED_OTHER, os.SCHED_BATCH)


class Scheduling(ctypes.Structure):
    """The kernel's `sched_attr` of one thread. `runtime_ns` is its slice; 0 where the kernel knows no slices."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
        ("util_min", ctypes.c_uint32),
        ("util_max", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, thread_id: int = 0) -> Scheduling | None:
        """The scheduling of a thread of this process, 0 for the calling one. None where the system does not tell."""
        found = cls()
        size = ctypes.sizeof(cls)
        return found if _call("sched_getattr", thread_id, ctypes.byref(found), size, 0) else None

    def apply(self, runtime_ns: int) -> None:
        """Ask for a slice for the calling thread, and leave the rest as it is. A system that refuses leaves the slice
        as it is, too."""
        self.runtime_ns = runtime_ns
        _call("sched_setattr", 0, ctypes.byref(self), 0)


@contextmanager
def short_slices() -> Iterator[None]:
    """Give slices of `SLICE_NS` to the threads that this one starts meanwhile, in whatever library. Nothing changes
    where the system knows no slices, or does not allow the choice."""
    before = Scheduling.of()
    if before is None or before.policy not in _SLICED_POLICIES:
        yield
        return
    own_ns = before.runtime_ns
    try:
        before.apply(SLICE_NS)
        yield
    finally:
        before.apply(own_ns)


def _call(name: str, *arguments: object) -> bool:
    """Make a system call, and return whether it has succeeded."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    return number is not None and ctypes.CDLL(None).syscall(number, *arguments) == 0
