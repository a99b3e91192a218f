"""Caches that lie on an accelerator, as torch sees it: registered there, or reached through staging memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvferry.agent.cache import Cache
from kvferry.agent.memory.arena import Arena, host_arena
from kvferry.errors import ConfigurationError
from kvferry.extras import missing_extra
from kvferry.plan.description.layout import Layout
from kvferry.staging.device.arena import device_arena, pinned_arena
from kvferry.staging.device.mover import DeviceMover, Launcher
from kvferry.staging.device.pinned import CudaRuntime, pinned
from kvferry.staging.device.table import StagingMemory, check_pair, check_staging, load_devices
from kvferry.transport.base import Memory
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registered_memory import Regions

__all__ = ["CacheDevice", "cache_device"]

IsDone = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CacheDevice:
    """The device that caches lie on, by kvferry's name, whose memory transports register, and where staging lies."""

    device: torch.device
    name: str
    buffer_device: str
    staging: StagingMemory = StagingMemory.HOST

    def cache(self, layouts: tuple[Layout, ...], memories: Sequence[Memory]) -> Cache:
        """How an agent gets at the cache of one rank, which lies in these memories."""
        if self.name == HOST:
            return Cache(layouts, tuple(memories))
        on_device = tuple(replace(memory, device=self.name, device_id=self.device.index or 0) for memory in memories)
        stream = _launcher(self.device)

        def mover(near: Sequence[Memory], notify: Callable[[], None]) -> DeviceMover:
            known = dict.fromkeys((*on_device, *near))
            pieces = Regions.of([(memory.address, memory.size_bytes) for memory in known])
            return DeviceMover(stream, pieces, [self._pinned(near)])

        registered = on_device if self.buffer_device == self.name else ()
        return Cache(layouts, registered, mover, self._arena, self.name, self.buffer_device)

    def milestone(self, stream: Any = None) -> IsDone:
        """Mark what the engine has put on a stream of torch so far, on the engine's thread: on its current one, where
        none is named. Return a function that says whether that is done, and neither waits nor lets the stream wait."""
        if self.name == HOST:
            return lambda: True
        module: Any = torch.get_device_module(self.device)
        event = module.Event()
        event.record(module.current_stream(self.device) if stream is None else stream)
        return partial(_is_done, event)

    def _pinned(self, near: Sequence[Memory]) -> ExitStack:
        """Pin memory of the host for as long as the mover lives, unless it was allocated pinned."""
        if self.device.type != "cuda":
            return ExitStack()
        return pinned(CudaRuntime(self.device), [memory for memory in near if memory.device == HOST])

    def _arena(self, num_bytes: int) -> Arena:
        if self.staging is StagingMemory.DEVICE:
            return device_arena(num_bytes, self.device, self.name)
        if self.device.type != "cuda":
            return pinned_arena(num_bytes, self.device)
        return host_arena(num_bytes)


def _is_done(event: Any) -> bool:
    return bool(event.query())


def _launcher(device: torch.device) -> Launcher:
    """What copies on a device. Raises MissingExtraError without Triton, which caches in host memory do not need."""
    try:
        from kvferry.staging.device.side_stream import SideStream
    except ModuleNotFoundError as error:
        raise (missing_extra(error, "kernels") or error) from error
    return SideStream(device)


def cache_device(device: torch.device, buffer_device: str, staging: StagingMemory = StagingMemory.HOST) -> CacheDevice:
    """The device that caches lie on. `buffer_device` is the device whose memory transports register, as torch
    calls it or as kvferry does: the same, or `cpu`.

    Raises ConfigurationError for what does not go together, and for a device that nothing here can copy on.
    """
    name = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    # Engines call it cuda wherever torch does.
    wanted = name if buffer_device == device.type else buffer_device
    load_devices()
    check_pair(name, wanted)
    check_staging(name, wanted, staging)
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ConfigurationError(
            f"caches on {name} cannot be reached yet",
            found=f"caches on {device}",
            expected="a CPU, or a CUDA, ROCm or XPU device",
            hint="nothing here copies on this device; open the agent with a kvferry.Cache that has a mover of its own",
        )
    return CacheDevice(device, name, wanted, staging)
