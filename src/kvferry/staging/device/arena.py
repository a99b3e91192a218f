"""Staging memory on a device: gathers and scatters stay inside it, the wire goes from device to device."""

from __future__ import annotations

import torch

from kvferry.errors import TransportError
from kvferry.transport.base import Memory

# Memory that peers may still write to when the agent ends is never freed, as no message says when they have stopped.
# Freed, it would soon belong to a tensor of the engine.
_kept: list[torch.Tensor] = []


class DeviceArena:
    """Zeroed memory of a device until `close`. `memory` is what transports register, named as they call the device."""

    __slots__ = ("_tensors", "memory")

    def __init__(self, num_bytes: int, device: torch.device, name: str) -> None:
        """Wait until the device is done with it: peers do not ask its streams. Raises TransportError when there is not
        enough memory."""
        try:
            tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            torch.get_device_module(device).synchronize(device)
        except RuntimeError as error:
            raise TransportError(
                f"cannot allocate {num_bytes:,} bytes of {name} memory for staging",
                found=str(error),
                hint="leave the device more memory beside the engine's, or set staging_memory to 'host'",
            ) from error
        self.memory = Memory(tensor.data_ptr(), num_bytes, -1, name, tensor.device.index or 0)
        self._tensors = [tensor]

    def close(self, may_be_written: bool) -> None:
        """Free it, or keep it for ever where a peer may still write to it. To be called when this process has ended
        its copies. Safe to call twice: the first call decides."""
        tensors, self._tensors = self._tensors, []
        if may_be_written:
            _kept.extend(tensors)
