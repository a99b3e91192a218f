"""A CUDA or XPU stream beside the engine's: neither waits for the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.programs.tiles import Tile
from kvferry.staging.device.kernels import copy_tile
from kvferry.staging.device.launches import Launch, launch_of

# Copies take milliseconds; a device that is stuck may never do them.
FINISH_S = 2.0
POLL_S = 0.001


class Index(NamedTuple):
    """What a device is told of tiles: how to go over each, and their columns, `here` in the host and `there` on it."""

    launches: tuple[Launch, ...]
    sizes: tuple[int, ...]
    here: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(cls, tiles: Sequence[Tile], device: torch.device) -> Index:
        """An index on its way to the device. It must be kept until the copies are done."""
        parts = [_even(tile.columns()) for tile in tiles]
        here = _pinned(torch.from_numpy(np.concatenate(parts)), device)
        there = here.to(device, non_blocking=True)
        return cls(tuple(map(launch_of, tiles)), tuple(map(len, parts)), here, there)

    def copy(self) -> None:
        """Queue the copies on the current stream. Raises what a compiler or driver does, which may be anything."""
        for part, launch in zip(torch.split(self.there, list(self.sizes)), self.launches, strict=True):
            copy_tile(part, launch)


class SideStream:
    """Launches copies on a stream of its own, which waits for no other: neither does the engine's wait for it.

    A copy reads bytes that must have been written when it is launched, and writes memory that must not be in use. So an
    engine synchronizes with its device before it tells the agent of blocks, as direct transfers require as well.
    `device` is a torch device: `cuda` (also for ROCm) or `xpu`, with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What torch.cuda and torch.xpu have in common has no common type.
        self._module: Any = torch.get_device_module(device)
        with self._selected():
            self._stream = self._module.Stream()

    def launch(self, tiles: Sequence[Tile]) -> Callable[[], bool]:
        """See `Launcher`."""
        done, failures = self._module.Event(), list[Exception]()
        with self._selected(), self._module.stream(self._stream):
            index = Index.of(tiles, self._device)
            try:
                index.copy()
            except Exception as error:  # noqa: BLE001 - compilers raise anything
                # The tiles before this one are under way: nothing has ended before they have.
                failures.append(error)
            done.record(self._stream)

        def is_done() -> bool:
            # This closure keeps the index alive on both sides: the kernel and the upload read it until then.
            is_over = bool(len(index.here) == len(index.there) and done.query())
            for error in failures if is_over else ():
                raise error
            return is_over

        return is_done

    def finish(self) -> None:
        """See `Launcher`."""
        deadline = time.monotonic() + FINISH_S
        while not self._stream.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"copies have not ended within {FINISH_S:g} s")
            time.sleep(POLL_S)

    def _selected(self) -> AbstractContextManager[object]:
        """Make the device the calling thread's meanwhile. Else torch would restore, with the stream before, a thread's
        first device, and selecting one that the process does not use takes half a GiB of its memory from its engine."""
        return nullcontext() if self._device.type == "cpu" else self._module.device(self._device)


def _pinned(columns: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The columns in pinned memory: only from there does an upload not stop the thread."""
    return columns if device.type == "cpu" else columns.pin_memory()


def _even(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Columns padded to even length: Triton makes another kernel for columns that begin at no multiple of 16 bytes."""
    return np.append(columns, 0) if len(columns) % 2 else columns
