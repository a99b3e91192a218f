"""Gathers and scatters in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvferry.plan.programs.tiles import Tile
from kvferry.staging.thread_mover import ThreadMover
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions, View, view_of
from kvferry.transport.rowcopy.gather_scatter import copy_tiles


def host_regions(memories: Sequence[Memory]) -> Regions:
    """Memories of this process, with views of them. Raises TransportError when one cannot exist or two overlap."""
    extents = [(memory.address, memory.size_bytes) for memory in memories]
    Regions.of(extents)  # Raises before any memory is touched.
    return Regions.of(extents, map(view_of, memories))


class HostMover(ThreadMover):
    """A `Mover` for memory that this process can read.

    `regions` are all memories that rows may touch; they must stay until `close`.
    """

    reaches_peer_memory = True

    def __init__(self, regions: Regions, notify: Callable[[], None]) -> None:
        self._regions = regions
        super().__init__(self._copied, notify)

    def _copied(self, tiles: Sequence[Tile], peer_view: View | None) -> Iterator[None]:
        return copy_tiles(self._regions if peer_view is None else self._regions.with_view(peer_view), tiles)
