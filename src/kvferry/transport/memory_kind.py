"""NIXL's kind of memory for each device: data, so that one more device is one more row.

The devices that engines run on, and whose memory may be registered beside each, are in `kvferry.staging.device.table`.
"""

from __future__ import annotations

from enum import StrEnum

from kvferry.errors import TransportError

HOST = "cpu"


class MemoryKind(StrEnum):
    """NIXL's names: memory of the host, or of a device."""

    DRAM = "DRAM"
    VRAM = "VRAM"


KINDS = {HOST: MemoryKind.DRAM, "cuda": MemoryKind.VRAM, "rocm": MemoryKind.VRAM, "xpu": MemoryKind.VRAM}


def register_kind(device: str, kind: MemoryKind) -> None:
    """Make the memory of one more device known; the same again is fine.

    Raises TransportError when it is known as another kind.
    """
    if KINDS.setdefault(device, kind) is not kind:
        raise TransportError(f"{device} memory is already registered", found=kind, expected=KINDS[device])


def kind_of(device: str) -> MemoryKind:
    """Raises TransportError for a device whose memory cannot be registered."""
    if device not in KINDS:
        raise TransportError(
            "memory of this device cannot be registered with NIXL",
            found=device,
            expected=" or ".join(KINDS),
            hint="set the buffer device to 'cpu': the cache then goes through staging memory in the host",
        )
    return KINDS[device]
