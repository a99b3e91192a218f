"""What an agent is told about caches that lie on a device: registered there, or reached through staging memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvferry.agent import Host, Notice
from kvferry.connectors.vllm.describe import Described
from kvferry.errors import ConfigurationError
from kvferry.plan.layout import Layout
from kvferry.staging.device_mover import DeviceMover
from kvferry.staging.device_plugins import load_devices
from kvferry.staging.devices import check_pair
from kvferry.staging.pinned import CudaRuntime, Pinned
from kvferry.staging.side_stream import SideStream
from kvferry.transport.base import Memory
from kvferry.transport.pieces import Pieces

__all__ = ["Buffers", "buffers_of"]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The device that caches lie on, by kvferry's name, and whose memory transports register."""

    device: torch.device
    name: str
    buffer_device: str

    def host(self, described: Described, layouts: tuple[Layout, ...], notify: Callable[[Notice], None]) -> Host:
        """How the agent gets at the caches; called on the engine's thread, behind whose work copies have to wait."""
        if self.name == "cpu":
            return Host(layouts, described.memories, notify)
        on_device = [
            replace(memory, device=self.name, device_id=self.device.index or 0) for memory in described.memories
        ]
        stream = SideStream(self.device, torch.cuda.current_stream(self.device))

        def mover(near: Sequence[Memory], ring: Callable[[], None]) -> DeviceMover:
            in_host = [memory for memory in near if memory.device == "cpu"]
            pieces = Pieces.of([(memory.address, memory.size_bytes) for memory in (*on_device, *in_host)])
            return DeviceMover(stream, pieces, [Pinned(CudaRuntime(self.device), in_host)])

        return Host(layouts, tuple(on_device) if self.buffer_device == self.name else (), notify, mover)


def buffers_of(caches: Mapping[str, torch.Tensor], buffer_device: str) -> Buffers:
    """Of the device that vLLM's caches lie on, and its `kv_buffer_device`.

    Raises ConfigurationError for two that do not go together, and for a device that nothing here can copy on.
    """
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return Buffers(device, "cpu", "cpu")
    name = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    # vLLM calls it cuda wherever torch does.
    wanted = name if buffer_device == device.type else buffer_device
    load_devices()
    check_pair(name, wanted)
    if device.type != "cuda":
        raise ConfigurationError(
            f"vLLM's caches on {name} cannot be reached yet",
            found=f"caches on {device}",
            expected="a cpu, or a device of CUDA or ROCm",
            hint="staging memory would have to be pinned for this device",
        )
    return Buffers(device, name, wanted)
