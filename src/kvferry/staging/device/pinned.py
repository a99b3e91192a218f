"""Host memory that a device's kernels reach: pinned while it is in use, and unpinned before it is unmapped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from kvferry.errors import ConfigurationError
from kvferry.transport.base import Memory


class Runtime(Protocol):
    """What pins host memory for a device; each returns the driver's status, 0 when all is well."""

    def register(self, address: int, num_bytes: int) -> int: ...

    def unregister(self, address: int) -> int:
        """Unpin host memory. Also raises RuntimeError, when the device has failed."""
        ...


class CudaRuntime:
    """The runtime of CUDA or ROCm for one device: whichever thread asks, no other device is woken up by it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        """See `Runtime`."""
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> int:
        """See `Runtime`."""
        with torch.cuda.device(self._device):
            return int(_cudart().cudaHostUnregister(address))


def pinned(runtime: Runtime, memories: Sequence[Memory]) -> ExitStack:
    """Pin memories of the host until what is returned is closed, once no kernel uses them any more.

    A driver knows by its address what it has pinned. Were that unmapped, whatever is mapped there next could not be
    pinned, and a kernel would still reach the pages that were there before.

    Raises ConfigurationError when the driver refuses one; then none is pinned.
    """
    with ExitStack() as pins:
        for memory in memories:
            _pin(runtime, memory)
            pins.callback(_unpin, runtime, memory)
        return pins.pop_all()


def _pin(runtime: Runtime, memory: Memory) -> None:
    status = runtime.register(memory.address, memory.size_bytes)
    if status != 0:
        raise ConfigurationError(
            "staging memory cannot be pinned",
            found=f"cudaHostRegister returned {status} for {memory.size_bytes:,} bytes",
            hint="raise the limit on locked memory (ulimit -l), or use less staging memory",
        )


def _unpin(runtime: Runtime, memory: Memory) -> None:
    try:
        runtime.unregister(memory.address)
    except RuntimeError:
        # The device has failed, and the driver has given up everything that belonged to it.
        return


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
