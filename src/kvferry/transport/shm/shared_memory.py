"""Memory that another process of the same host can attach: an anonymous file that vanishes with its last user."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvferry.errors import TransportError
from kvferry.system import RAISE_LIMIT, hint_for, os_error_text
from kvferry.transport.base import Memory
from kvferry.transport.machine.host_memory import host_memory


class SharedMemory:
    """Shared memory: `memory` is what transports register, `buffer` its bytes, writable.

    `close` is safe to call twice and while arrays still show the buffer: the pages go when the last array goes.
    """

    __slots__ = ("_mapping", "buffer", "memory")

    def __init__(self, memory: Memory, mapping: mmap.mmap) -> None:
        self.memory = memory
        self.buffer = memoryview(mapping)
        self._mapping = mapping

    def close(self, may_be_written: bool = False) -> None:
        """Peers cannot attach any more; those that have stay attached. The first call decides.

        With `may_be_written` a peer may still write to the memory. Then its addresses stay reserved for the life of the
        process, as their next owner would get the late bytes. The contents are lost and the pages are given back.
        """
        if self.memory.shared_fd < 0:
            return
        os.close(self.memory.shared_fd)
        self.memory = Memory(self.memory.address, self.memory.size_bytes, -1)
        try:
            if may_be_written:
                _kept.append(self)
                self._mapping.madvise(mmap.MADV_REMOVE)
            else:
                self.buffer.release()
                self._mapping.close()
        except (BufferError, OSError):
            # Views are still in use, and Python unmaps the pages when the last one is gone. Or, as in some sandboxes,
            # the kernel cannot take pages back: then the memory stays taken.
            return


# No message can say when peers have stopped writing to these, because the agent that they knew has ended.
_kept: list[SharedMemory] = []


def allocate_shared(num_bytes: int, name: str) -> SharedMemory:
    """Zeroed shared memory; `name` only shows up in /proc. Raises TransportError when there is not enough.

    The pages are taken at once and the size is sealed: running out of memory is an error here and not a SIGBUS
    later, and no process can shrink the file while another one has it mapped.
    """
    if num_bytes <= 0:
        raise TransportError("shared memory needs a size", found=f"{num_bytes} bytes", expected="at least one")
    _check_available(num_bytes, name)
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # Page tables are filled now, not during the first transfer, where each fault would cost microseconds.
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise TransportError(
            f"cannot allocate {num_bytes} bytes of shared memory for {name!r}",
            found=os_error_text(error),
            hint=hint_for(error, "ask for less (a smaller cache, --staging-mib) or give the process more memory"),
        ) from error
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    return SharedMemory(Memory(address, num_bytes, fd), mapping)


def check_sealed(fd: int) -> None:
    """Raises TransportError unless the size of the file can never shrink: touching a lost page kills a process."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportError("this descriptor is not a memfd", found=os_error_text(error)) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransportError(
            "shared memory whose size is not sealed",
            expected="a memfd with F_SEAL_SHRINK",
            hint="use allocate_shared()",
        )


def _check_available(num_bytes: int, name: str) -> None:
    """Asking the kernel for more than there is does not fail: it gets a process killed, perhaps another one."""
    memory = host_memory()
    if not memory.total:
        what = "nobody says how much memory there is"
        raise TransportError(what, found="no /proc/meminfo that can be read", hint="is /proc there? " + RAISE_LIMIT)
    if num_bytes > memory.available:
        raise TransportError(
            f"not enough memory for {name!r}",
            found=f"{memory.available:,} bytes available",
            expected=f"{num_bytes:,} bytes",
            hint="ask for less (a smaller cache, --staging-mib) or give the process more memory; the memory of an "
            "engine that has just ended is released within seconds",
        )
