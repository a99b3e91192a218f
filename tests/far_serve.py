"""`kvferry` whose engine's cache lies on a device that is not there: `python far_serve.py FILE serve …`.

The engine computes in memory of the host, and everybody else is told that its cache lies FAR_ADDRESS higher, on an XPU
that nothing registers: what follows these addresses by mistake ends the process. Only the mover, which stands for the
device's copies, knows better.
"""

import sys
from dataclasses import replace
from functools import partial

import torch
from host_devices import FAR_ADDRESS

from kvferry import Cache, Memory
from kvferry.cli.main import main
from kvferry.connectors.transformers import core
from kvferry.staging.host_mover import HostMover
from kvferry.transport.registered_memory import Regions, view_of

# The file is what other scripts are told by.
del sys.argv[1]


def far_layout(layout):
    regions = (replace(each, address=each.address + FAR_ADDRESS, kind="vram") for each in layout.regions)
    return replace(layout, regions=tuple(regions))


class FarCache:
    """As the engine knows a `CacheDevice`."""

    device = torch.device("cpu")

    def cache(self, layouts, memories):
        far = tuple(replace(memory, address=memory.address + FAR_ADDRESS, shared_fd=-1) for memory in memories)
        moved = tuple(map(far_layout, layouts))
        return Cache(moved, (), partial(self._mover, far), device="xpu", buffer_device="cpu")

    def _mover(self, far: tuple[Memory, ...], near, notify):
        contents = [view_of(replace(memory, address=memory.address - FAR_ADDRESS)) for memory in far]
        memories = [*far, *near]
        extents = [(memory.address, memory.size_bytes) for memory in memories]
        return HostMover(Regions.of(extents, [*contents, *map(view_of, near)]), notify)


core._device = lambda settings: FarCache()
main()
