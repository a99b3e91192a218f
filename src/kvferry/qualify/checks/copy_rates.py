"""How fast the device gathers and scatters, beside its copy engine and a copy within its own memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import Tile
from kvferry.qualify.expected import TOLERANCE, expected_of
from kvferry.qualify.outcome import Figure, Outcome, failed, passed, skipped
from kvferry.qualify.rows import rows
from kvferry.qualify.torch_device import TorchDevice
from kvferry.staging.device.patterns import tiles_of

NAME: Final = "copy rates"
TOTAL_BYTES: Final = 1 << 30
ROW_BYTES: Final = (256, 4096)
REPEATS: Final = 9
PINNED, OWN = "a pinned copy", "a copy on the device"


class _CopyCase(NamedTuple):
    """Rows between a cache, at every second place of it, and dense memory."""

    name: str
    cache: torch.Tensor
    dense: torch.Tensor
    gathers: bool
    of: str
    expected: float

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.cache, self.dense) if self.gathers else (self.dense, self.cache)

    def copies(self, row_bytes: int) -> Copies:
        number = np.arange(len(self.dense) // row_bytes)
        sparse, dense = number * 2 * row_bytes, number * row_bytes
        places = (sparse, dense) if self.gathers else (dense, sparse)
        return rows(*self.ends, np.stack([*places, np.full(len(number), row_bytes)], axis=1))

    def is_right(self, row_bytes: int) -> bool:
        """What was copied, and that nothing lies between it in a cache that was empty."""
        cache = self.cache.view(-1, 2, row_bytes)
        is_clean = self.gathers or not bool(cache[:, 1].any())
        return is_clean and torch.equal(cache[:, 0], self.dense.to(self.cache.device).view(-1, row_bytes))


def run(kind: str) -> Outcome:
    """Raises ModuleNotFoundError without Triton."""
    return check(TorchDevice(kind))


def check(device: TorchDevice) -> Outcome:
    """What is timed is done once more afterwards, and every byte compared."""
    in_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    total = min(TOTAL_BYTES, device.free_bytes // 8, in_host) // ROW_BYTES[-1] * ROW_BYTES[-1]
    if not total:
        return skipped(NAME, "no memory is free, or the driver does not say how much")
    figures = []
    for case in _cases(device, total):
        for row_bytes in ROW_BYTES:
            tiles = tiles_of(case.copies(row_bytes))
            figure = _figure(device, case, row_bytes, tiles)
            source, target = case.ends
            target.zero_()
            source.copy_(torch.randint(0, 256, (len(source),), dtype=torch.uint8, device=source.device))
            device.wait()
            device.copy(tiles)
            if not case.is_right(row_bytes):
                return failed(NAME, f"{case.name}, rows of {row_bytes} bytes: wrong bytes")
            figures.append(figure)
    return passed(NAME, f"{total >> 20:,} MiB in rows of {' and '.join(map(str, ROW_BYTES))} bytes", tuple(figures))


def _cases(device: TorchDevice, total: int) -> tuple[_CopyCase, ...]:
    cache, here, host = device.empty(2 * total), device.empty(total), device.pinned(total)
    expected = expected_of(device.kind)
    return (
        _CopyCase("gather to the host", cache, host, True, PINNED, expected.gather),
        _CopyCase("scatter from the host", cache, host, False, PINNED, expected.scatter),
        _CopyCase("gather on the device", cache, here, True, OWN, expected.on_device),
    )


def _figure(device: TorchDevice, case: _CopyCase, row_bytes: int, tiles: Sequence[Tile]) -> Figure:
    source, target = case.ends
    num_bytes = len(case.dense)
    taken = device.seconds(
        {
            "limit": lambda: target[:num_bytes].copy_(source[:num_bytes], non_blocking=True),
            "rows": lambda: device.launch(tiles),
        },
        REPEATS,
    )
    return Figure(
        name=f"{case.name}, rows of {row_bytes} bytes",
        gigabytes_per_s=num_bytes / taken["rows"] / 1e9,
        share=taken["limit"] / taken["rows"],
        of=case.of,
        expected=case.expected,
        least=case.expected * TOLERANCE,
    )
