"""Staging memory as torch allocates it: on a device, where gathers and scatters stay inside it, or in the host, pinned
for a device whose driver pins nothing that others have allocated."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.errors import TransportError
from kvferry.transport.base import Memory

# Memory that peers may still write to when the agent ends is never freed, as no message says when they have stopped.
# Freed, it would soon belong to a tensor of the engine.
_kept: list[torch.Tensor] = []


class TensorArena:
    """Memory of a tensor until `close`; an `Arena`."""

    __slots__ = ("_tensors", "memory")

    def __init__(self, tensor: torch.Tensor, memory: Memory) -> None:
        """`memory` is what transports register: all bytes of the tensor."""
        self._tensors, self.memory = [tensor], memory

    def close(self, may_be_written: bool) -> None:
        """Free it, or keep it for ever where a peer may still write to it. To be called when this process has ended
        its copies. Safe to call twice: the first call decides."""
        tensors, self._tensors = self._tensors, []
        if may_be_written:
            _kept.extend(tensors)


def device_arena(num_bytes: int, device: torch.device, name: str) -> TensorArena:
    """Zeroed memory of a device, which transports call `name`. Waits until the device is done with it: peers do not ask
    its streams. Raises TransportError when there is not enough memory."""

    def allocate() -> torch.Tensor:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.get_device_module(device).synchronize(device)
        return tensor

    hint = "leave the device more memory beside the engine's, or set staging_memory (--staging-memory) to 'host'"
    tensor = _allocated(allocate, f"cannot allocate {num_bytes:,} bytes of {name} memory for staging", hint)
    return TensorArena(tensor, Memory(tensor.data_ptr(), num_bytes, -1, name, tensor.device.index or 0))


def pinned_arena(num_bytes: int, device: torch.device) -> TensorArena:
    """Zeroed memory of the host that this device, the process's accelerator, reaches at the same addresses. Raises
    TransportError when there is not enough memory, or no such device."""

    def allocate() -> torch.Tensor:
        with torch.get_device_module(device).device(device):
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    hint = "less staging memory; is the device here?"
    tensor = _allocated(allocate, f"cannot allocate {num_bytes:,} bytes of pinned memory for staging", hint)
    return TensorArena(tensor, Memory(tensor.data_ptr(), num_bytes, -1))


def _allocated(allocate: Callable[[], torch.Tensor], what: str, hint: str) -> torch.Tensor:
    try:
        return allocate()
    except RuntimeError as error:
        raise TransportError(what, found=str(error), hint=hint) from error
