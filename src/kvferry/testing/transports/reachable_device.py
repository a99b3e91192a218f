"""A device whose memory transports reach and this process does not, so that what lies there can be tested without one.

Every byte of it is one of the host's, `FAR_ADDRESS` further up: at its device address no program of ours can touch it,
and whoever follows one by mistake dies at once. Only what stands for the device's own copies and for its transports
knows better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvferry.agent.memory.arena import SharedArena
from kvferry.plan.programs.copies import Column, Copies, Direction
from kvferry.staging.host_mover import HostMover
from kvferry.testing.transports.far_device import FAR_ADDRESS
from kvferry.transport.base import Completion, Memory, Ticket, Transport
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registered_memory import Regions, View, view_of


class DeviceMemory:
    """`num_bytes` of a device called `device`. `memory` is what everybody is told, `contents` what is in it, for
    engines and tests to see and change. Can be an agent's arena."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """Raises TransportError when there is not enough memory."""
        self._lent = SharedArena(num_bytes, f"kvferry-{device}")
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


class DeviceTransport:
    """Passes everything on to `inner`, with the addresses that memory of the device has in truth."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name

    @property
    def progress_interval_s(self) -> float:
        return self._inner.progress_interval_s

    def register(self, memory: Memory) -> None:
        """Raises what the inner transport raises, as all that follow do."""
        self._inner.register(_in_host(memory))

    def unregister(self, memory: Memory) -> None:
        self._inner.unregister(_in_host(memory))

    def descriptor(self) -> bytes:
        return self._inner.descriptor()

    def connect(self, peer: str, descriptor: bytes) -> None:
        self._inner.connect(peer, descriptor)

    def carriers(self, peer: str) -> tuple[str, ...]:
        return self._inner.carriers(peer)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        rows = replace(copies, source=_lowered(copies.source), target=_lowered(copies.target))
        return self._inner.post(peer, rows, direction)

    def cancel(self, ticket: Ticket) -> None:
        self._inner.cancel(ticket)

    def poll(self) -> list[Completion]:
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()


def _in_host(memory: Memory) -> Memory:
    if memory.device == HOST:
        return memory
    return Memory(memory.address - FAR_ADDRESS, memory.size_bytes, -1)


def _lowered(address: Column) -> Column:
    return np.where(address >= FAR_ADDRESS, address - np.uint64(FAR_ADDRESS), address)
