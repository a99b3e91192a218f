"""Devices made of host memory, so that tests need none: their device addresses cannot be accessed by any program.

`FarDevice` stands for a device whose memory no transport can register: it is reached through staging memory only.
`DeviceMemory` stands for one whose memory transports reach. Whoever follows a device address by mistake dies at once;
only what stands for the device's copies and for its transports knows where the bytes really are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from faulty_transport import ForwardingTransport

from kvferry.plan.programs.copies import Column, Copies, Direction
from kvferry.staging.host_mover import HostMover
from kvferry.transport.base import Memory, Ticket
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registered_memory import Regions, View, view_of
from kvferry.transport.shm.shared_memory import allocate_shared

# Such as those of Intel's GPUs: with the highest bit, which no address of a program has. Every access is an error.
FAR_ADDRESS = 0xFFF0 << 48


class FarDevice:
    """`size_bytes` of memory at `address`; `contents` is what is in it, for engines and tests to see and change."""

    def __init__(self, size_bytes: int, address: int = FAR_ADDRESS) -> None:
        self.memory = Memory(address, size_bytes, -1)
        self.contents: View = np.zeros(size_bytes, np.uint8)


def far_mover(device: FarDevice, near: Sequence[Memory], notify: Callable[[], None]) -> HostMover:
    """The only way to and from the device's memory: a mover between it and memories of this process.

    Raises TransportError when memories overlap.
    """
    memories = (device.memory, *near)
    extents = [(memory.address, memory.size_bytes) for memory in memories]
    return HostMover(Regions.of(extents, [device.contents, *map(view_of, near)]), notify)


class DeviceMemory:
    """`num_bytes` of a device called `device`. `memory` is what everybody is told, `contents` what is in it, for
    engines and tests to see and change. Can be an agent's arena."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """Raises TransportError when there is not enough memory."""
        self._lent = allocate_shared(num_bytes, f"kvferry-{device}")
        self.memory = Memory(self._lent.memory.address + FAR_ADDRESS, num_bytes, -1, device)
        self.contents: View = np.frombuffer(self._lent.buffer, np.uint8)

    def close(self, may_be_written: bool) -> None:
        """Free it, or keep it: see `kvferry.agent.memory.arena.Arena`."""
        self.contents = np.empty(0, np.uint8)
        self._lent.close(may_be_written)


def device_mover(memories: Sequence[Memory], notify: Callable[[], None]) -> HostMover:
    """What the device copies with, between memories of its own and of the host. Raises TransportError when some
    overlap."""
    extents = [(memory.address, memory.size_bytes) for memory in memories]
    return HostMover(Regions.of(extents, [view_of(_in_host(memory)) for memory in memories]), notify)


class DeviceTransport(ForwardingTransport):
    """Translates addresses of device memory to those that it has in truth."""

    def register(self, memory: Memory) -> None:
        self._inner.register(_in_host(memory))

    def unregister(self, memory: Memory) -> None:
        self._inner.unregister(_in_host(memory))

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        rows = replace(copies, source=_lowered(copies.source), target=_lowered(copies.target))
        return self._inner.post(peer, rows, direction)


def _in_host(memory: Memory) -> Memory:
    if memory.device == HOST:
        return memory
    return Memory(memory.address - FAR_ADDRESS, memory.size_bytes, -1)


def _lowered(address: Column) -> Column:
    return np.where(address >= FAR_ADDRESS, address - np.uint64(FAR_ADDRESS), address)
