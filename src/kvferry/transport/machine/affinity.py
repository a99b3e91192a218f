"""Which network cards are nearest to a device: how much of their way to it on the bus is shared."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.transport.machine.facts import UNKNOWN_NODE, Accelerator, Nic


def nearest(accelerator: Accelerator, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """Those that share the most bridges with the device, else its memory node; all of them where nothing tells."""
    if not nics:
        return ()
    closeness = [_closeness(accelerator, nic) for nic in nics]
    best = max(closeness)
    return tuple(nic for nic, close in zip(nics, closeness, strict=True) if close == best)


def _closeness(accelerator: Accelerator, nic: Nic) -> tuple[int, bool]:
    """Bridges in common from the root of the bus on, then whether both belong to one memory node."""
    num_shared = 0
    for ours, theirs in zip(accelerator.bus, nic.bus, strict=False):
        if ours != theirs:
            break
        num_shared += 1
    return num_shared, UNKNOWN_NODE != accelerator.numa_node == nic.numa_node
