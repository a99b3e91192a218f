"""Memory of the agent's own that peers are told of, and read and write by address: staging memory and the probe.

An agent can end before its peers have, in a process that lives on. Nothing of ours can stop their writes then, least of
all those that a network card carries out: whoever got the same addresses next would get the late bytes as well.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared

# Addresses that peers may still write to. No message says when that is over, as nobody of ours is left to receive it:
# so they stay taken for the rest of the process's life. What they cost is a file descriptor, not the memory.
_kept: list[SharedMemory] = []


class Arena(Protocol):
    """Memory that peers are told of, of the host or of a device: whoever brings it knows how to keep it."""

    @property
    def memory(self) -> Memory:
        """What transports register."""
        ...

    def close(self, may_be_written: bool) -> None:
        """Free it, unless a peer may still write to it: then nothing else may get its addresses while this process
        lives. Called when nothing of ours copies any more. Safe to call twice: the first word counts."""
        ...


class LentMemory:
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
        """See `Arena`. What is kept takes addresses and no memory."""
        if may_be_written and self.memory.shared_fd >= 0:
            self._shared.abandon()
            _kept.append(self._shared)
        else:
            self._shared.close()


def host_arena(num_bytes: int) -> Arena:
    """Staging memory of the host. Raises TransportError when there is not enough memory."""
    return LentMemory(num_bytes, "kvferry-staging")
