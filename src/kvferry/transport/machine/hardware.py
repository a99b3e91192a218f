"""Network ports and accelerators, as the kernel shows them below /sys: no driver and no library is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvferry.transport.machine.facts import UNKNOWN_NODE, Accelerator, Nic, NicKind

ROOT: Final = Path("/")
VENDORS: Final = {"0x10de": "cuda", "0x1002": "rocm", "0x8086": "xpu", "0x1ae0": "tpu"}
KINDS: Final = frozenset(VENDORS.values())
"""The names of all kinds of accelerators."""
# PCI classes: display controllers, 3D controllers, and processing accelerators.
CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|pci[0-9a-f]{4,}:[0-9a-f]{2}")


def nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Every port of every card, RDMA first. What cannot be read is left out; `root` is for tests."""
    return (*_rdma_ports(root / "sys/class/infiniband"), *_interfaces(root / "sys/class/net"))


def accelerators(root: Path = ROOT) -> tuple[Accelerator, ...]:
    """All of them, by PCI address. `root` is for tests."""
    return tuple(_accelerators(root / "sys/bus/pci/devices"))


def content(path: Path) -> str:
    """The content of a small file of the kernel; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def bus_of(device: Path) -> tuple[str, ...]:
    """The PCI addresses on the way to a device, from the root of its bus on; empty for what is virtual."""
    return tuple(part for part in device.resolve().parts if ADDRESS.fullmatch(part))


def node_of(device: Path) -> int:
    """The memory node of a device; -1 where the system does not say."""
    text = content(device / "numa_node")
    return int(text) if text.lstrip("-").isdecimal() else UNKNOWN_NODE


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _rdma_ports(folder: Path) -> Iterator[Nic]:
    for card in _entries(folder):
        device = card / "device"
        for port in _entries(card / "ports"):
            state = content(port / "state").partition(":")[2].strip().lower() or "unknown"
            kind = NicKind.INFINIBAND if content(port / "link_layer") == "InfiniBand" else NicKind.ROCE
            yield Nic(
                name=f"{card.name}:{port.name}",
                kind=kind,
                is_up=state == "active",
                state=state,
                numa_node=node_of(device),
                bus=bus_of(device),
                gigabits_per_s=_leading_number(content(port / "rate")),
            )


def _interfaces(folder: Path) -> Iterator[Nic]:
    for interface in _entries(folder):
        state, device = content(interface / "operstate") or "unknown", interface / "device"
        # The loopback interface and some virtual ones have no carrier to know about, and work.
        is_up = state in ("up", "unknown")
        speed = max(0.0, _leading_number(content(interface / "speed")) / 1000)
        yield Nic(interface.name, NicKind.ETHERNET, is_up, state, node_of(device), bus_of(device), speed)


def _leading_number(text: str) -> float:
    first = text.split(maxsplit=1)[:1]
    try:
        return float(first[0]) if first else 0.0
    except ValueError:
        return 0.0


def _accelerators(folder: Path) -> Iterator[Accelerator]:
    for device in _entries(folder):
        kind = VENDORS.get(content(device / "vendor"), "")
        if kind and content(device / "class").startswith(CLASSES):
            yield Accelerator(device.name, kind, node_of(device), bus_of(device))
