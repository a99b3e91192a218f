"""A device that is not there, of host memory, which copies as kernels do; and ones that are broken."""

from __future__ import annotations

import time

import numpy as np

from kvferry.plan.programs.tiles import rows_of
from kvferry.qualify.torch_device import TorchDevice
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import view_of


class StandIn(TorchDevice):
    """Called a CUDA device. `rates` has what steps that were timed take, in seconds, by their names."""

    def __init__(self, free_bytes: int = 16 << 30, **rates: float) -> None:
        super().__init__("cpu")
        self.kind = "cuda"
        self._free_bytes, self._rates = free_bytes, rates

    @property
    def name(self) -> str:
        return "Stand-in 9000"

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def pinned(self, num_bytes):
        return self.empty(num_bytes)

    def wait(self) -> None:
        pass

    def launch(self, tiles):
        rows = rows_of(tiles)
        for source, target, length in zip(*self.changed(rows.source, rows.target, rows.length), strict=True):
            _bytes_at(target, length)[:] = _bytes_at(source, length)
        return

    def changed(self, source, target, length):
        """What a broken one makes of the columns."""
        return source.tolist(), target.tolist(), length.tolist()

    def seconds(self, steps, repeats):
        if self._rates:
            return self._rates
        return super().seconds(steps, 1)

    def _timed(self, step) -> float:
        began = time.perf_counter()
        step()
        return max(time.perf_counter() - began, 1e-9)


def _bytes_at(address, length):
    return view_of(Memory(int(address), int(length), -1)) if length else np.empty(0, np.uint8)


class Shortened(StandIn):
    """Leaves out the last byte of rows whose length is no multiple of four."""

    def changed(self, source, target, length):
        return source.tolist(), target.tolist(), [each - (each % 4 > 0) for each in length.tolist()]


class Spilling(StandIn):
    """Copies a byte too many of rows of 12 bytes."""

    def changed(self, source, target, length):
        return source.tolist(), target.tolist(), [each + (each == 12) for each in length.tolist()]


class ThirtyTwoBits(StandIn):
    """Knows the lower 32 bits of offsets in a large piece of memory."""

    large = range(0)

    def empty(self, num_bytes):
        found = super().empty(num_bytes)
        if num_bytes > 1 << 32:
            self.large = range(found.data_ptr(), found.data_ptr() + num_bytes)
        return found

    def changed(self, source, target, length):
        start = self.large.start

        def near(column):
            return [start + (each - start) % (1 << 32) if each in self.large else each for each in column.tolist()]

        return near(source), near(target), length.tolist()
