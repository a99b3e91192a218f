"""A device that this process cannot reach: its memory has addresses, but nothing may be read or written there.

It stands for a device whose memory no transport can register, so that the way through host memory can be tested without
one. An engine's layout may say that its blocks lie on it; whoever follows such an address by mistake dies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.staging.host_mover import HostMover
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions, View, view_of

# No processor of ours has so wide an address space for programs: every access is an error.
FAR_ADDRESS = 0x00F0 << 48


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
