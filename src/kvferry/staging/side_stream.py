"""A stream of a device beside the engine's: kernels that wait for the engine's, while the engine waits for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.tiles import Tile
from kvferry.staging.kernels import copy_tile
from kvferry.staging.launches import Launch, launch_of

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
        with self._selected(), self._module.stream(engine_stream):
            self._stream = self._module.Stream()

    def launch(self, tiles: Sequence[Tile]) -> Callable[[], bool]:
        """See `Launcher`. Neither the calling thread nor the engine's stream waits for anything."""
        launches = [launch_of(tile) for tile in tiles]
        parts = [_even(tile.columns()) for tile in tiles]
        ready, done = self._module.Event(), self._module.Event()
        with self._selected(), self._module.stream(self._stream):
            ready.record(self._engine_stream)
            self._stream.wait_event(ready)
            here = self._pinned(torch.from_numpy(np.concatenate(parts)))
            columns = here.to(self._device, non_blocking=True)
            for part, launch in zip(torch.split(columns, [len(part) for part in parts]), launches, strict=True):
                self._copy(part, launch)
            done.record(self._stream)

        def is_done() -> bool:
            # Whoever holds this holds the columns too, on both sides: the kernel and the upload read them until then.
            return bool(len(here) == len(columns) and done.query())

        return is_done

    def finish(self) -> None:
        """See `Launcher`."""
        self._stream.synchronize()

    def _selected(self) -> AbstractContextManager[object]:
        """The device is the calling thread's meanwhile. Else torch would put back, with the stream before, a thread's
        first device, and to select one that the process does not use takes half a GiB of it from its engine."""
        return nullcontext() if self._device.type == "cpu" else self._module.device(self._device)

    def _copy(self, columns: torch.Tensor, launch: Launch) -> None:
        try:
            copy_tile(columns, launch)
        except RuntimeError:
            # Nobody will ask for the tiles that were launched before this one: they must not go on by themselves.
            self.finish()
            raise

    def _pinned(self, columns: torch.Tensor) -> torch.Tensor:
        """Only from pinned memory does an upload not stop the thread."""
        return columns if self._device.type == "cpu" else columns.pin_memory()


def _even(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """With a number more where it takes that: Triton makes another kernel for columns that begin at no multiple of 16
    bytes."""
    return np.append(columns, 0) if len(columns) % 2 else columns
