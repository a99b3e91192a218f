"""What an engine brings to its agent: where every element of its cache lies, and how to get at it.

For a cache on an accelerator, `kvferry.devices` makes the `Cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.agent.memory.arena import Arena, host_arena
from kvferry.agent.memory.digests import lies_in
from kvferry.errors import ConfigurationError
from kvferry.plan.description.layout import Layout
from kvferry.staging.host_mover import HostMover, host_regions
from kvferry.staging.mover import Mover
from kvferry.transport.base import Memory
from kvferry.transport.memory_kind import HOST


def host_mover(memories: Sequence[Memory], notify: Callable[[], None]) -> Mover:
    """Return a mover for engines whose blocks lie in memory that the CPU reaches."""
    return HostMover(host_regions(memories), notify)


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one rank: the layouts of all ranks of its engine, and the memory of this one that transports may
    register. The engine computes on `device`; `buffer_device` is the one whose memory is registered.

    Regions that lie in none of `memories` are reached through staging memory only. `mover` makes what copies between
    regions, memories and staging memory: it gets all registered memory and a function to call when a copy has ended.
    `arena` makes staging memory of so many bytes, on the device where transports register its memory, else in the host.

    An engine that computes on a device asks for a lease, or reports its growth, once the tokens are written there, and
    for a fetch once it is done with the blocks: nothing here waits for its streams.
    """

    layouts: tuple[Layout, ...]
    memories: tuple[Memory, ...]
    mover: Callable[[Sequence[Memory], Callable[[], None]], Mover] = host_mover
    arena: Callable[[int], Arena] = host_arena
    device: str = HOST
    buffer_device: str = HOST

    def is_staged(self, rank: int) -> bool:
        """Whether a region of this rank is no registered memory. Raises ConfigurationError when only a part is."""
        extents = [(memory.address, memory.address + memory.size_bytes) for memory in self.memories]
        regions = self.layouts[rank].regions
        outside = [region for region in regions if not lies_in(region, extents)]
        if outside and len(outside) < len(regions):
            raise ConfigurationError(
                "some regions of a layout can be registered and others cannot",
                found=f"{len(outside)} of {len(regions)} lie elsewhere, such as {outside[0]}",
                expected="all of them in registered memory, or none",
            )
        return bool(outside)
