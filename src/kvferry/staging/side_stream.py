"""A stream of a device beside the engine's: kernels that wait for the engine's, while the engine waits for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvferry.staging.kernels import copy_tile
from kvferry.staging.tiles import Tile, launch_of

__all__ = ["SideStream"]


class SideStream:
    """Launches copies on a stream of its own, on the device and behind the work of `engine_stream`.

    Make it where the engine's current stream is known: which stream is current is a matter of the thread, and the
    agent's thread is not the engine's. `device` is a torch device: `cuda` (also for ROCm) or `xpu`, with its number.
    Launch nothing while the engine captures a graph on its stream: an event from elsewhere would spoil the capture.
    """

    def __init__(self, device: torch.device, engine_stream: torch.Stream) -> None:
        self._device = device
        self._engine_stream = engine_stream
        # What torch.cuda and torch.xpu have in common has no common type.
        self._module: Any = torch.get_device_module(device)
        with self._module.stream(engine_stream):
            self._stream = self._module.Stream()

    def launch(self, tile: Tile) -> Callable[[], bool]:
        """See `Launcher`. Neither the calling thread nor the engine's stream waits for anything."""
        launch = launch_of(tile)
        ready, done = self._module.Event(), self._module.Event()
        with self._module.stream(self._stream):
            ready.record(self._engine_stream)
            self._stream.wait_event(ready)
            here = self._pinned(torch.from_numpy(tile.columns()))
            columns = here.to(self._device, non_blocking=True)
            copy_tile(columns, launch)
            done.record(self._stream)

        def is_done() -> bool:
            # Whoever holds this holds the columns too, on both sides: the kernel and the upload read them until then.
            return bool(len(here) == len(columns) and done.query())

        return is_done

    def finish(self) -> None:
        """See `Launcher`."""
        self._stream.synchronize()

    def _pinned(self, columns: torch.Tensor) -> torch.Tensor:
        """Only from pinned memory does an upload not stop the thread."""
        return columns if self._device.type == "cpu" else columns.pin_memory()
