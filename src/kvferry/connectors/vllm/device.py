"""What an agent is told about caches that lie on a device: they are reached through staging memory in the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvferry.agent import Host, Notice
from kvferry.connectors.vllm.describe import Described
from kvferry.errors import ConfigurationError
from kvferry.plan.layout import Layout
from kvferry.staging.device_mover import DeviceMover
from kvferry.staging.devices import check_pair
from kvferry.staging.side_stream import SideStream
from kvferry.transport.base import Memory
from kvferry.transport.pieces import Pieces

__all__ = ["host_of"]


def host_of(
    described: Described, layouts: tuple[Layout, ...], caches: Mapping[str, torch.Tensor], buffer_device: str
) -> Callable[[Callable[[Notice], None]], Host]:
    """How the agent gets at the caches; called on the engine's thread, behind whose work copies have to wait.

    Raises ConfigurationError for a device and a buffer device that do not go together.
    """
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return lambda notify: Host(layouts, described.memories, notify)
    name = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    check_pair(name, buffer_device)
    if buffer_device != "cpu" or device.type != "cuda":
        raise ConfigurationError(
            f"caches on {name} cannot be moved in this way yet",
            found=f"kv_buffer_device {buffer_device!r}",
            expected="'cpu', with CUDA or ROCm",
            hint="set kv_buffer_device to cpu: everything goes through pinned memory of the host then",
        )
    stream = SideStream(device, torch.cuda.current_stream(device))

    def mover(near: Sequence[Memory], ring: Callable[[], None]) -> DeviceMover:
        _pin(near)
        extents = [(memory.address, memory.size_bytes) for memory in (*described.memories, *near)]
        return DeviceMover(stream, Pieces.of(extents))

    return lambda notify: Host(layouts, (), notify, mover)


def _pin(memories: Sequence[Memory]) -> None:
    """Make host memory reachable for the device's kernels. Raises ConfigurationError when the driver refuses."""
    for memory in memories:
        status = torch.cuda.cudart().cudaHostRegister(memory.address, memory.size_bytes, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise ConfigurationError(
                "staging memory cannot be pinned",
                found=f"cudaHostRegister returned {int(status)} for {memory.size_bytes:,} bytes",
                hint="raise the limit on locked memory (ulimit -l), or use less staging memory",
            )
