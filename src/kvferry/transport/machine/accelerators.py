"""The devices of this machine that compute, as the PCI bus shows them: no driver and no library is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvferry.transport.machine.facts import Accelerator
from kvferry.transport.machine.nics import ROOT, bus_of, node_of, word

VENDORS: Final = {"0x10de": "cuda", "0x1002": "rocm", "0x8086": "xpu", "0x1ae0": "tpu"}
KINDS: Final = frozenset(VENDORS.values())
"""What devices of theirs are called."""
# Display controllers, 3D controllers, and processing accelerators.
CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")


def accelerators(root: Path = ROOT) -> tuple[Accelerator, ...]:
    """All of them, by PCI address. `root` is for tests."""
    return tuple(_found(root / "sys/bus/pci/devices"))


def _found(folder: Path) -> Iterator[Accelerator]:
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = VENDORS.get(word(device / "vendor"), "")
        if kind and word(device / "class").startswith(CLASSES):
            yield Accelerator(device.name, kind, node_of(device), bus_of(device))
