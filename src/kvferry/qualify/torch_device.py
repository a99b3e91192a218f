"""The device that is checked, as torch sees it: memory, copies, and a clock of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvferry.plan.programs.tiles import Tile
from kvferry.qualify.expected import GPUS
from kvferry.staging.device.table import torch_name

NUM_WARM_UPS = 2
# What the device does while it is told of the copies that are timed.
BLANKET_BYTES = 1 << 30

Step = Callable[[], object]


def number_of(kind: str) -> int:
    """How many devices of this kind torch has; 0 where it was built for others."""
    if kind == "cpu":
        return 1
    has_rocm = torch.version.hip is not None
    if kind not in GPUS or (kind != "xpu" and has_rocm != (kind == "rocm")):
        return 0
    return int(torch.get_device_module(torch_name(kind)).device_count())


class TorchDevice:
    """Device `number` of a kind, by kvferry's name for that, which becomes that of the calling thread. Tests have
    others, of host memory."""

    def __init__(self, kind: str, number: int = 0) -> None:
        self.kind = kind
        self.torch = torch.device("cpu") if kind == "cpu" else torch.device(torch_name(kind), number)
        self._module: Any = torch.get_device_module(self.torch)
        self._blanket = torch.empty(0)
        if kind != "cpu":
            self._module.set_device(self.torch)

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return "host memory" if self.kind == "cpu" else str(self._module.get_device_name(self.torch))

    @property
    def free_bytes(self) -> int:
        """Memory that nobody uses, as far as the driver says; 0 where it does not."""
        self._module.empty_cache()
        try:
            return int(self._module.mem_get_info(self.torch)[0])
        except (AttributeError, RuntimeError):
            return 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the device. Raises RuntimeError when it has not so many."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the host that the device reaches."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def launch(self, tiles: Sequence[Tile]) -> object:
        """Queue copies as transfers do, with their index; what comes back must stay until they have ended."""
        from kvferry.staging.device.side_stream import Index

        index = Index.of(tiles, self.torch)
        index.copy()
        return index

    def copy(self, tiles: Sequence[Tile]) -> None:
        """The same, to the end."""
        kept = self.launch(tiles)
        self.wait()
        del kept

    def wait(self) -> None:
        """Until everything that was queued has ended."""
        if self.kind != "cpu":
            self._module.synchronize(self.torch)

    def seconds(self, steps: Mapping[str, Step], repeats: int) -> dict[str, float]:
        """Medians by the device's own clock; every repeat queues each step once."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(NUM_WARM_UPS + repeats):
            for name, step in steps.items():
                taken = self._timed(step)
                if number >= NUM_WARM_UPS:
                    times[name].append(taken)
        return {name: statistics.median(values) for name, values in times.items()}

    def _timed(self, step: Step) -> float:
        """The device is busy while it is told what to do: how long that takes is no part of the copy."""
        if not len(self._blanket):
            self._blanket = self.empty(min(BLANKET_BYTES, self.free_bytes // 4))
        began, ended = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        self._blanket.zero_()
        began.record()
        kept = step()
        ended.record()
        ended.synchronize()
        del kept
        return float(began.elapsed_time(ended)) / 1000
