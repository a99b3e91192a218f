"""Memory of the agent that peers read and write by address: staging memory and the probe.

An agent can end before its peers, in a process that lives on. It cannot stop their writes then, least of all those of a
network card: the next owner of the same addresses would get the late bytes.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared

# Addresses that peers may still write to. No message can say when that is over, because the agent has ended: so they
# stay reserved for the life of the process. They cost address space, not memory.
_kept: list[SharedMemory] = []


class Arena(Protocol):
    """Memory that peers read and write, of the host or of a device."""

    @property
    def memory(self) -> Memory:
        """The memory that transports register."""
        ...

    def close(self, may_be_written: bool) -> None:
        """Free it, unless a peer may still write to it: then nothing else may get its addresses while this process
        lives. Called when the agent has ended its copies. Safe to call twice: the first call decides."""
        ...


class SharedArena:
    """Shared memory until `close`. `memory` is what transports register, `buffer` its bytes, writable."""

    __slots__ = ("_shared",)

    def __init__(self, num_bytes: int, name: str) -> None:
        """Raises TransportError when there is not enough memory."""
        self._shared = allocate_shared(num_bytes, name)

    @property
    def memory(self) -> Memory:
        return self._shared.memory

    @property
    def buffer(self) -> memoryview:
        return self._shared.buffer

    def close(self, may_be_written: bool) -> None:
        """See `Arena`. An arena that is kept takes addresses and no memory."""
        if may_be_written and self.memory.shared_fd >= 0:
            self._shared.abandon()
            _kept.append(self._shared)
        else:
            self._shared.close()


def host_arena(num_bytes: int) -> Arena:
    """Staging memory of the host. Raises TransportError when there is not enough memory."""
    return SharedArena(num_bytes, "kvferry-staging")
