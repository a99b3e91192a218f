"""Whether copies of rows on the device leave every byte as their specification does, wherever and however long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.qualify.outcome import Outcome, Result, failed, passed
from kvferry.qualify.rows import copied, noise, rows
from kvferry.qualify.torch_device import TorchDevice, number_of
from kvferry.staging.device.patterns import tiles_of

NAME = "kernels"
UNITS = (1, 2, 4, 8, 16, 48, 256)
"""Bytes of which all lengths, and all distances between rows, are multiples."""
NUM_ROWS = 700
# More than an offset of 32 bits reaches.
FAR = 5 << 30
FAR_ROWS = "kernels beyond 4 GiB"


def run(kind: str) -> Outcome:
    """Check all devices of the kind. Raises ModuleNotFoundError without Triton."""
    found = [check(TorchDevice(kind, number)) for number in range(number_of(kind))]
    wrong = [f"device {number}: {each.words}" for number, each in enumerate(found) if each.result is Result.FAILED]
    if wrong:
        return failed(NAME, "; ".join(wrong))
    # What one device could not try was not tried on all of them.
    without = [number for number, each in enumerate(found) if each.left_out]
    told = found[without[0]] if without else found[0]
    where = f" on {len(without)} of them" if 0 < len(without) < len(found) else ""
    return passed(NAME, f"on each of {len(found)} devices {told.words}{where}", left_out=told.left_out)


def check(device: TorchDevice) -> Outcome:
    """Copy rows of every alignment between the device and pinned host memory, in all directions, and far apart."""
    dice, num_rows = np.random.default_rng(3), 0
    for unit in UNITS:
        for what, places in (("equal rows", _equal(unit, dice)), ("uneven rows", _uneven(unit, dice))):
            for direction, here, there in _ends(device, places):
                if wrong := _num_wrong(device, here, there, places):
                    return failed(NAME, f"{wrong:,} bytes are wrong: {what} of {unit} bytes, {direction}")
                num_rows += len(places)
    words = f"{num_rows:,} rows of {len(UNITS)} alignments are right, and nothing beside them has changed"
    if device.free_bytes < FAR + (1 << 30):
        untried = f"{words}; beyond 4 GiB it was not tried: so much memory is not free"
        return passed(NAME, untried, left_out=(FAR_ROWS,))
    if wrong := _num_wrong_far(device):
        return failed(NAME, f"{wrong:,} bytes are wrong where rows lie more than 4 GiB apart")
    return passed(NAME, f"{words}, also beyond 4 GiB")


def _equal(unit: int, dice: np.random.Generator) -> NDArray[np.int64]:
    """Rows of three units out of every four, from anywhere to anywhere."""
    source, target = dice.permutation(NUM_ROWS), dice.permutation(NUM_ROWS)
    return np.stack([4 * unit * source, 4 * unit * target, np.full(NUM_ROWS, 3 * unit)], axis=1)


def _uneven(unit: int, dice: np.random.Generator) -> NDArray[np.int64]:
    """Rows of one to sixty units, one after another at the source, in any order and with gaps at the target."""
    length = dice.integers(1, 61, NUM_ROWS) * unit
    order = dice.permutation(NUM_ROWS)
    gap = dice.integers(0, 3, NUM_ROWS) * unit
    target = np.empty(NUM_ROWS, np.int64)
    target[order] = np.cumsum((length + gap)[order]) - length[order]
    return np.stack([np.cumsum(length) - length, target, length], axis=1)


def _ends(device: TorchDevice, places: NDArray[np.int64]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    source_bytes, target_bytes = (int((places[:, end] + places[:, 2]).max()) for end in (0, 1))
    yield "within the device", device.empty(source_bytes), device.empty(target_bytes)
    yield "from the device to the host", device.empty(source_bytes), device.pinned(target_bytes)
    yield "from the host to the device", device.pinned(source_bytes), device.empty(target_bytes)


def _num_wrong(device: TorchDevice, source: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> int:
    source.copy_(noise(len(source)))
    target.copy_(before := noise(len(target), seed=5))
    device.wait()
    device.copy(tiles_of(rows(source, target, places)))
    return int((target.cpu() != copied(source.cpu(), before, places)).sum())


def _num_wrong_far(device: TorchDevice) -> int:
    """The number of wrong bytes in rows from below 4 GiB to above and back, within the device, and through the host."""
    memory, host, length = device.empty(FAR + 4096), device.pinned(4096), 64
    near, far = memory[:4096], memory[FAR:]
    near.copy_(before := noise(4096))
    far.zero_()
    host.zero_()
    device.wait()
    rows_out = np.array([[0, FAR, length], [128, FAR + 128, length]])
    rows_back = np.array([[FAR, 1024, length], [FAR + 128, 2048, length]])
    device.copy(tiles_of(rows(memory, memory, rows_out)))
    device.copy(tiles_of(rows(memory, memory, rows_back)))
    device.copy(tiles_of(rows(memory, host, np.array([[FAR, 0, length]]))))
    device.copy(tiles_of(rows(host, memory, np.array([[0, FAR + 512, length]]))))
    empty = torch.zeros(4096, dtype=torch.uint8)
    above = copied(before, empty, np.array([[0, 0, length], [128, 128, length], [0, 512, length]]))
    below = copied(before, before, np.array([[0, 1024, length], [128, 2048, length]]))
    in_host = copied(before, empty, np.array([[0, 0, length]]))
    pairs = (far, above), (near, below), (host, in_host)
    return sum(int((found.cpu() != expected).sum()) for found, expected in pairs)
