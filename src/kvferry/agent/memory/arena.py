"""Memory of the agent that peers read and write by address: staging memory and the probe.

An agent can end before its peers, in a process that lives on. It cannot stop their writes then, least of all those of a
network card: the next owner of the same addresses would get the late bytes.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.transport.base import Memory
from kvferry.transport.shm.shared_memory import allocate_shared


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


def host_arena(num_bytes: int) -> Arena:
    """Staging memory of the host. Raises TransportError when there is not enough memory."""
    return allocate_shared(num_bytes, "kvferry-staging")
